// A small thread team of our own: kernels are short (10 to 500 us), so waking must be cheap, and waiting must not burn a core.
//
// A worker that has nothing to do looks for work for kSpinMicroseconds, giving way to other processes meanwhile, then sleeps
// in the kernel. Work is claimed item by item: a thread that loses its core delays one item, not the whole operation.
#pragma once
#include <cstdint>

namespace pool {

using Body = void (*)(void* context, int64_t begin, int64_t end);

// Calls body over disjoint ranges that cover [0, count), at most `chunk` items each, on up to `threads` threads; returns
// when all are done. Nested and concurrent calls run on the caller's thread alone. `body` must not throw.
void run(int64_t count, int64_t chunk, int threads, Body body, void* context);

// The same over a callable (begin, end).
template <class F> void parallel(int64_t count, int64_t chunk, int threads, const F& f) {
  run(count, chunk, threads, [](void* c, int64_t b, int64_t e) { (*static_cast<const F*>(c))(b, e); }, const_cast<void*>(static_cast<const void*>(&f)));
}

}  // namespace pool
