#include "thread_pool.h"

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "kernels.h"

namespace anaphora {
namespace {

class Pool {
   public:
    explicit Pool(int num_threads) {
        try {
            for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { work(); });
        } catch (...) {  // the system gives no more threads
            stop();
            throw;
        }
    }

    ~Pool() { stop(); }

    int size() const { return static_cast<int>(workers_.size()) + 1; }

    void run(int num_tasks, void (*task)(void*, int), void* context) {
        if (num_tasks <= 0) return;
        if (workers_.empty() || num_tasks == 1) {
            for (int i = 0; i < num_tasks; ++i) task(context, i);
            return;
        }
        // While the job number is odd nobody can claim, so the fields below may change.
        const uint64_t closed = (ticket_.load(std::memory_order_relaxed) / kJob + 1) * kJob;
        ticket_.store(closed);
        // Released one by one: who acquires any of them also sees that the old job is closed.
        task_.store(task, std::memory_order_release);
        context_.store(context, std::memory_order_release);
        num_tasks_.store(num_tasks, std::memory_order_release);
        num_done_.store(0, std::memory_order_release);
        ticket_.store(closed + kJob);
        if (num_parked_.load() > 0) ticket_.notify_all();
        claim_until_empty();
        while (num_done_.load(std::memory_order_acquire) < num_tasks) pause();
    }

   private:
    static constexpr uint64_t kJob = uint64_t{1} << 32;  // ticket = job number, next task
    static constexpr int kSpins = 4000;                  // some 50 to 100 microseconds

    void claim_until_empty() {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while (true) {
            const auto index = static_cast<int>(ticket & (kJob - 1));
            const int num_tasks = num_tasks_.load(std::memory_order_acquire);
            if ((ticket / kJob) % 2 != 0 || index >= num_tasks) return;
            const auto task = task_.load(std::memory_order_acquire);
            void* context = context_.load(std::memory_order_acquire);
            // Succeeds only if the job is still the one whose fields were read.
            if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) {
                task(context, index);
                num_done_.fetch_add(1, std::memory_order_release);
                ticket = ticket_.load(std::memory_order_acquire);
            }
        }
    }

    void work() {
        while (!stop_.load(std::memory_order_relaxed)) {
            claim_until_empty();
            const uint64_t seen = ticket_.load();
            if (!is_exhausted(seen)) continue;
            int spins = 0;
            while (ticket_.load(std::memory_order_relaxed) == seen && spins < kSpins) {
                pause();
                ++spins;
            }
            if (spins < kSpins) continue;
            num_parked_.fetch_add(1);
            if (!stop_.load()) ticket_.wait(seen);
            num_parked_.fetch_sub(1);
        }
    }

    bool is_exhausted(uint64_t ticket) const {
        return (ticket / kJob) % 2 != 0 ||
               static_cast<int>(ticket & (kJob - 1)) >= num_tasks_.load(std::memory_order_acquire);
    }

    void stop() {
        stop_.store(true);
        ticket_.fetch_add(kJob);
        ticket_.notify_all();
        for (auto& worker : workers_) worker.join();
        workers_.clear();
    }

    std::vector<std::thread> workers_;
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int> num_done_{0};
    alignas(64) std::atomic<void (*)(void*, int)> task_{nullptr};
    std::atomic<void*> context_{nullptr};
    std::atomic<int> num_tasks_{0};
    std::atomic<int> num_parked_{0};
    std::atomic<bool> stop_{false};
};

// The process's pool, and the lock that whoever uses or replaces it holds.
struct Shared {
    std::mutex mutex;
    std::unique_ptr<Pool> pool = std::make_unique<Pool>(1);

    // A forked child has none of the workers and maybe a lock that nobody will open: start anew.
    static void after_fork();
};

Shared* shared_pool() {
    static Shared* shared = [] {
        pthread_atfork(nullptr, nullptr, Shared::after_fork);
        return new Shared;  // never destroyed: a thread may be in a kernel when the process ends
    }();
    return shared;
}

void Shared::after_fork() {
    Shared* shared = shared_pool();
    static_cast<void>(shared->pool.release());
    new (shared) Shared;
}

}  // namespace

void run_tasks(int num_tasks, void (*task)(void*, int), void* context) {
    Shared* shared = shared_pool();
    const std::lock_guard lock(shared->mutex);
    shared->pool->run(num_tasks, task, context);
}

void set_num_threads(int n) {
    Shared* shared = shared_pool();
    const std::lock_guard lock(shared->mutex);
    if (shared->pool->size() != n) shared->pool = std::make_unique<Pool>(n);
}

int num_threads() {
    Shared* shared = shared_pool();
    const std::lock_guard lock(shared->mutex);
    return shared->pool->size();
}

}  // namespace anaphora
