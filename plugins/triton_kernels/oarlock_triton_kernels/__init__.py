"""Triton kernels for every device that declares the capability `triton`.

    plugin         the hooks; light, no torch and no triton
    registry       which op is served by what, and the chapters of docs/kernels.md
    interpreter    what Triton's interpreter needs to compute as a device does; tests only
    launches/      every kernel at the shapes of real models, compiled ahead of time for described chips by the tests

How a kernel file is written, so that each reads like the next:

- it opens with a legend of the dimension letters it uses;
- each `@triton.jit` kernel fits a page (80 lines at most). The first line of its docstring says its grid and what it computes; then come a
  line for each pointer with shape, dtype and strides, `Reference:` the torch function that it must equal, `Cost:` FLOP and bytes as
  formulae, and `Bound:` which limit binds on a large chip and why. docs/kernels.md is made of these docstrings;
- pointers end in `_ptr`, strides are `stride_` and the letters of the dimensions they step over; a last dimension of stride 1 is said, not passed;
- its launcher, a plain function with the signature of the op's reference, stands right below it: it checks, allocates, chooses sizes by a
  table of constants (never by timing, so that a run repeats), and launches. It reads no tensor's values: a graph may record it;
- offsets into tensors that grow with the cache or the vocabulary are int64;
- arithmetic is in float32 and rounded once, as the reference does.
"""
