// A pool for kernels: tasks are claimed one by one, so a core that is taken away by another
// process only delays the one task it holds. Workers spin briefly between kernels, then park.
#pragma once

#include <type_traits>

namespace anaphora {

// For loops that wait for another thread. Never emitted: files of several instruction sets use it.
__attribute__((always_inline)) inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void run_tasks(int num_tasks, void (*task)(void* context, int index), void* context);

// Calls body(i) for i in [0, num_tasks), each once, on any thread; returns when all are done. They
// are begun in ascending order, so a task may wait for those before it.
// Calls from several threads take turns; body must not call parallel_for, and must not throw.
template <class Body>
void parallel_for(int num_tasks, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run_tasks(
        num_tasks, [](void* context, int i) noexcept { (*static_cast<Plain*>(context))(i); },
        const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace anaphora
