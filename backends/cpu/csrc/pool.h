// A small thread team of our own: kernels are short (10 to 500 us), so waking must be cheap, and waiting must not burn a core.
//
// A worker that has nothing to do looks for work for kSpinMicroseconds, giving way to other processes meanwhile, then sleeps
// in the kernel. Work is claimed item by item: a thread that loses its core delays one item, not the whole operation.
#pragma once
#include <cstdint>
#include <type_traits>

namespace pool {

// `next`: where the range begins that this thread does next, `count` if there is none or it is not known.
using Body = void (*)(void* context, int64_t begin, int64_t end, int64_t next);

// Calls body over disjoint ranges that cover [0, count), at most `chunk` items each, on up to `threads` threads; returns
// when all are done. Nested and concurrent calls run on the caller's thread alone. `body` must not throw. `ahead`: a thread claims a range
// while it still has one, so that `next` is known.
void run(int64_t count, int64_t chunk, int threads, bool ahead, Body body, void* context);

// The same over a callable (begin, end), or (begin, end, next), which claims ahead.
template <class F> void parallel(int64_t count, int64_t chunk, int threads, const F& f) {
  constexpr bool ahead = std::is_invocable_v<const F&, int64_t, int64_t, int64_t>;
  auto body = [](void* c, int64_t begin, int64_t end, int64_t next) {
    const F& g = *static_cast<const F*>(c);
    if constexpr (ahead) g(begin, end, next); else g(begin, end);
  };
  run(count, chunk, threads, ahead, body, const_cast<void*>(static_cast<const void*>(&f)));
}

}  // namespace pool
