#include "common/scheduler.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <utility>

namespace patrickstar {

namespace {

constexpr int kPolicies = 4;
constexpr uint64_t kOften = 8;  // a priority changes in one of so many choices
constexpr uint64_t kSeldom = 64;

int planted_bug = 0;
std::atomic<int64_t> readings{0};
thread_local std::shared_ptr<Scheduler::Thread> own;

[[noreturn]] void end_process(const char* why) {
  std::fprintf(stderr, "schedule: %s\n", why);
  std::abort();
}

}  // namespace

bool planted(int bug) { return planted_bug == bug; }

int64_t scheduled_nanoseconds() { return 1000 * ++readings; }

Scheduler& Scheduler::get() {
  static auto* const scheduler = new Scheduler;  // never destroyed: threads may outlive static objects
  return *scheduler;
}

void Scheduler::start(uint64_t seed) {
  enter();
  free_now();
  policy_ = static_cast<Policy>(seed % kPolicies);
  random_.seed(seed);
  readings = 0;
  trace_ = 1469598103934665603u;
  for (const auto& thread : threads_) thread->priority = random_();
}

void Scheduler::enter() {
  if (own != nullptr) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (current_ != nullptr) end_process("a thread that is not scheduled uses an event or a queue");
  own = std::make_shared<Thread>();
  threads_.push_back(own);
  current_ = own;
}

std::shared_ptr<Scheduler::Thread> Scheduler::choose() {
  std::vector<size_t> able;
  for (size_t index = 0; index < threads_.size(); ++index) {
    if (!threads_[index]->ready || threads_[index]->ready()) able.push_back(index);
  }
  if (able.empty()) end_process("deadlock: all threads wait");
  const bool trainer_can = able.front() == 0;
  size_t chosen = able[random_() % able.size()];
  if (policy_ == Policy::kLate && trainer_can) chosen = 0;
  if (policy_ == Policy::kPriorities || policy_ == Policy::kSteady) {
    chosen = *std::max_element(able.begin(), able.end(), [this](size_t one, size_t other) {
      return threads_[one]->priority < threads_[other]->priority;
    });
    if (random_() % (policy_ == Policy::kSteady ? kSeldom : kOften) == 0) threads_[chosen]->priority = random_();
  }
  trace_ = (trace_ ^ chosen) * 1099511628211u;
  return threads_[chosen];
}

// Unlocks before it notifies: the next thread would wake to a mutex that is held.
void Scheduler::hand_over(std::unique_lock<std::mutex>& lock) {
  const std::shared_ptr<Thread> next = current_ = choose();
  if (next == own) return;
  lock.unlock();
  next->turn.notify_one();
  lock.lock();
}

void Scheduler::pass(Condition ready) {
  enter();
  std::unique_lock<std::mutex> lock(mutex_);
  own->ready = std::move(ready);
  hand_over(lock);
  own->turn.wait(lock, [this] { return current_ == own; });
  own->ready = nullptr;
}

std::shared_ptr<Scheduler::Thread> Scheduler::add(Condition ready) {
  enter();
  const std::lock_guard<std::mutex> lock(mutex_);
  auto thread = std::make_shared<Thread>();
  thread->ready = std::move(ready);
  thread->priority = random_();
  threads_.push_back(thread);
  return thread;
}

void Scheduler::become(const std::shared_ptr<Thread>& thread) {
  own = thread;
  std::unique_lock<std::mutex> lock(mutex_);
  own->turn.wait(lock, [this] { return current_ == own; });
}

void Scheduler::leave() {
  std::unique_lock<std::mutex> lock(mutex_);
  threads_.erase(std::find(threads_.begin(), threads_.end(), own));
  hand_over(lock);
}

}  // namespace patrickstar

extern "C" {
__attribute__((visibility("default"))) void ps_schedule(uint64_t seed) { patrickstar::Scheduler::get().start(seed); }
__attribute__((visibility("default"))) void ps_plant(int bug) { patrickstar::planted_bug = bug; }
__attribute__((visibility("default"))) uint64_t ps_trace() { return patrickstar::Scheduler::get().trace(); }
}
