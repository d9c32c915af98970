// Pool of worker threads that share numbered chunks of work with the calling thread.
//
// The caller takes part, so a pool of n threads has n - 1 workers. They start with the first
// parallel call. A worker without work spins for kSpinNs and then sleeps. The next op and the next
// forward pass therefore find it awake, and an idle process uses no CPU time. Results never depend
// on the number of threads: no sum depends on the division into chunks, and each chunk writes its
// own outputs.
//
// Two Python threads may use one pool: while one runs a job, the other runs its chunks by itself.
// After a fork the child process starts its own workers. If the system refuses to start threads,
// the pool reports it on stderr and continues with fewer; threads() then returns their number.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace exl {

using ChunkFn = void (*)(void* context, int64_t chunk);

class ThreadPool {
  public:
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int threads() const { return threads_.load(std::memory_order_relaxed); }

    // Calls fn(context, i) once for each i in [0, chunks). Rethrows the first exception.
    void run(int64_t chunks, ChunkFn fn, void* context);

    template <class Body>
    void parallel_for(int64_t chunks, Body&& body) {
        run(
            chunks, [](void* context, int64_t chunk) { (*static_cast<Body*>(context))(chunk); },
            &body
        );
    }

  private:
    struct Workers;
    void start_workers();

    std::atomic<int> threads_;
    std::atomic<int> workers_ready_{0};  // 1 + fork count at which workers_ was started
    std::unique_ptr<Workers> workers_;   // null if no worker could start
};

// Returns scratch memory of the calling thread, 64-byte aligned and valid until the thread's next
// call with the same slot. Ops call this on every invocation; the buffer grows as needed and is
// never freed before the thread ends. Throws std::bad_alloc.
void* thread_scratch(int slot, int64_t bytes);
constexpr int kScratchSlots = 15;

}  // namespace exl
