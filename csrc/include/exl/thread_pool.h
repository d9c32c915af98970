// Worker threads that share numbered chunks of work with the caller.
//
// The caller takes part, so a pool of n has n - 1 workers; they start with the first parallel call.
// A worker that runs out of work spins for kSpinNs and then sleeps: the next op of a pass, and the
// next pass, find it awake, and an idle process costs nothing. Results never depend on the number of
// threads, because no sum depends on how the work is cut and each chunk writes its own outputs.
// Two Python threads may use one pool: the second runs its chunks itself. After fork the child
// starts workers of its own. Where the system refuses threads, the pool says so on stderr and goes on
// with fewer; threads() then tells how many.
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

    // Calls fn(context, i) once for each i in [0, chunks); rethrows the first exception.
    void run(int64_t chunks, ChunkFn fn, void* context);

    template <class Body>
    void parallel_for(int64_t chunks, Body&& body) {
        run(chunks, [](void* context, int64_t chunk) { (*static_cast<Body*>(context))(chunk); },
            &body);
    }

private:
    struct Crew;
    void start_crew();

    std::atomic<int> threads_;
    std::atomic<int> crew_ready_{0};  // 1 + number of forks at which crew_ was started
    std::unique_ptr<Crew> crew_;      // none: no worker could start
};

// Memory of the calling thread, 64-byte aligned, valid until its next call with the same slot.
// Grows and stays: ops ask for it on every call. Throws std::bad_alloc.
void* thread_scratch(int slot, int64_t bytes);
constexpr int kScratchSlots = 10;

}  // namespace exl
