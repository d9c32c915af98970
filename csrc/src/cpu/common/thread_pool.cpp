// Implementation of include/exl/thread_pool.h.
//
// The pool runs one job at a time. `Workers::entry` tracks its participants: the upper 32 bits are
// the number of the job, bit 31 is set once the job is closed, and the bits below count the workers
// that have entered it. The caller closes the job when no chunk is left and waits only for the
// workers that entered, so that a worker that is still waking up costs nothing.
#include "exl/thread_pool.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace exl {

// Time that an idle worker spins before it sleeps. It covers the gap between two forward passes:
// sampling, constraints and the next batch plan take 150 to 500 us, and waking up would cost the
// next pass as much again. It is short enough that a finished request burns no visible CPU time.
constexpr int64_t kSpinNs = 500'000;

static void pause_cpu() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

static int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch()
    )
        .count();
}

// Number of forks in the history of this process. Workers started at an earlier count do not exist
// in the child.
static std::atomic<int> fork_count{0};

static void watch_forks() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] {
        fork_count.fetch_add(1, std::memory_order_relaxed);
    });
    (void)registered;
}

struct ThreadPool::Workers {
    // Starts up to `count` threads, as many as the system allows. `refusal` gives the reason if
    // there are fewer.
    explicit Workers(int count) : born_at_fork(fork_count.load()) {
        threads.reserve(static_cast<size_t>(count));
        try {
            while (size() < count) threads.emplace_back([this] { work(); });
        } catch (const std::exception& error) {  // std::system_error, or std::bad_alloc
            // No exception may leave the constructor: the threads that run must be joined first.
            std::snprintf(refusal, sizeof refusal, "%s", error.what());
        }
    }

    int size() const { return static_cast<int>(threads.size()); }

    void stop() {
        {
            std::lock_guard<std::mutex> lock(sleep_mutex);
            stopping.store(true);
        }
        wake.notify_all();
        for (std::thread& thread : threads) thread.join();
    }

    void run(int64_t count, ChunkFn body, void* body_context) {
        chunks = count;
        fn = body;
        context = body_context;
        failure = nullptr;
        failed.store(false, std::memory_order_relaxed);
        next.store(0, std::memory_order_relaxed);
        finished.store(0, std::memory_order_relaxed);
        const uint64_t job = (entry.load(std::memory_order_relaxed) >> 32) + 1;
        entry.store(job << 32, std::memory_order_seq_cst);
        if (sleepers.load(std::memory_order_seq_cst) > 0) {
            {
                std::lock_guard<std::mutex> lock(sleep_mutex);
            }
            wake.notify_all();
        }
        take_chunks();
        const uint64_t closed = entry.fetch_or(kClosed, std::memory_order_acq_rel);
        const uint64_t entered = closed & (kClosed - 1);
        for (int spins = 0; finished.load(std::memory_order_acquire) != entered; ++spins) {
            if (spins < 2000) {
                pause_cpu();
            } else {
                std::this_thread::yield();
            }
        }
        if (failed.load(std::memory_order_relaxed)) std::rethrow_exception(failure);
    }

    void take_chunks() {
        for (;;) {
            const int64_t chunk = next.fetch_add(1, std::memory_order_relaxed);
            if (chunk >= chunks) return;
            try {
                fn(context, chunk);
            } catch (...) {
                // run() rethrows the first exception in the caller. Chunks that have not started
                // are dropped.
                if (!failed.exchange(true)) failure = std::current_exception();
                next.store(chunks, std::memory_order_relaxed);
            }
        }
    }

    void work() {
        uint64_t seen = 0;
        while (wait_for_job(seen)) {
            uint64_t state = entry.load(std::memory_order_acquire);
            seen = state >> 32;
            bool joined = false;
            while (!(state & kClosed) && (state >> 32) == seen && !joined) {
                joined = entry.compare_exchange_weak(
                    state, state + 1, std::memory_order_acq_rel, std::memory_order_acquire
                );
            }
            if (!joined) continue;
            take_chunks();
            finished.fetch_add(1, std::memory_order_release);
        }
    }

    bool has_job(uint64_t seen) const {
        return (entry.load(std::memory_order_seq_cst) >> 32) != seen || stopping.load();
    }

    // Returns false when the pool stops.
    bool wait_for_job(uint64_t seen) {
        const int64_t give_up = now_ns() + kSpinNs;
        for (;;) {
            for (int i = 0; i < 32; ++i) {
                if (has_job(seen)) return !stopping.load();
                pause_cpu();
            }
            if (now_ns() > give_up) break;
        }
        std::unique_lock<std::mutex> lock(sleep_mutex);
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        wake.wait(lock, [&] { return has_job(seen); });
        sleepers.fetch_sub(1, std::memory_order_relaxed);
        return !stopping.load();
    }

    static constexpr uint64_t kClosed = uint64_t{1} << 31;

    const int born_at_fork;
    std::mutex caller;  // held by the thread whose job runs
    int64_t chunks = 0;
    ChunkFn fn = nullptr;
    void* context = nullptr;
    std::exception_ptr failure;
    std::atomic<bool> failed{false};
    alignas(64) std::atomic<int64_t> next{0};
    alignas(64) std::atomic<uint64_t> entry{kClosed};
    alignas(64) std::atomic<uint64_t> finished{0};
    std::atomic<int> sleepers{0};
    std::atomic<bool> stopping{false};
    std::mutex sleep_mutex;
    std::condition_variable wake;
    char refusal[96] = "";
    std::vector<std::thread> threads;
};

ThreadPool::ThreadPool(int threads) : threads_(threads) { watch_forks(); }

void ThreadPool::start_workers() {
    if (workers_ != nullptr) (void)workers_.release();  // see ~ThreadPool
    const int wanted = threads_.load() - 1;
    int count = wanted;
    while (count > 0) {
        auto workers = std::make_unique<Workers>(count);
        if (workers->size() == count) {
            workers_ = std::move(workers);
            break;
        }
        // A limit of the system is reached. Memory and threads that other parts of the process need
        // count against the same limit, so the pool keeps half of the threads that could start.
        const int started = workers->size();
        workers->stop();
        count = started / 2;
        std::fprintf(
            stderr,
            "exl: only %d of %d worker threads could start (%s); going on with %d. "
            "Ask for fewer threads, or raise the limits on processes and memory.\n",
            started, wanted, workers->refusal, count
        );
    }
    threads_.store(count + 1);
}

ThreadPool::~ThreadPool() {
    if (workers_ == nullptr) return;
    if (workers_->born_at_fork != fork_count.load()) {
        // The threads exist only in the parent process. Joining or destroying them here would hang.
        (void)workers_.release();
        return;
    }
    workers_->stop();
}

static void run_alone(int64_t chunks, ChunkFn fn, void* context) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) fn(context, chunk);
}

void ThreadPool::run(int64_t chunks, ChunkFn fn, void* context) {
    if (threads_.load(std::memory_order_relaxed) == 1 || chunks <= 1) {
        return run_alone(chunks, fn, context);
    }
    // Guards the first start and the restart after a fork.
    static std::atomic_flag starting = ATOMIC_FLAG_INIT;
    if (workers_ready_.load(std::memory_order_acquire) != fork_count.load() + 1) {
        if (starting.test_and_set(std::memory_order_acquire)) {
            return run_alone(chunks, fn, context);  // another thread is starting the workers
        }
        struct Clear {  // also when start_workers throws for lack of memory
            ~Clear() { starting.clear(std::memory_order_release); }
        } clear_at_end;
        if (workers_ready_.load(std::memory_order_relaxed) != fork_count.load() + 1) {
            start_workers();
            workers_ready_.store(fork_count.load() + 1, std::memory_order_release);
        }
    }
    if (workers_ == nullptr) return run_alone(chunks, fn, context);  // no worker could start
    std::unique_lock<std::mutex> lock(workers_->caller, std::try_to_lock);
    if (!lock.owns_lock()) return run_alone(chunks, fn, context);
    workers_->run(chunks, fn, context);
}

void* thread_scratch(int slot, int64_t bytes) {
    struct Buffer {
        void* data = nullptr;
        int64_t bytes = 0;
        ~Buffer() { std::free(data); }
    };
    thread_local Buffer buffers[kScratchSlots];
    Buffer& buffer = buffers[slot];
    if (buffer.bytes < bytes) {
        const int64_t size = (bytes + 4095) / 4096 * 4096;
        void* fresh = nullptr;
        if (posix_memalign(&fresh, 4096, static_cast<size_t>(size)) != 0) throw std::bad_alloc();
        std::free(buffer.data);
        buffer.data = fresh;
        buffer.bytes = size;
    }
    return buffer.data;
}

}  // namespace exl
