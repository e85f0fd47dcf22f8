#include <cerrno>
#include <cstring>
#include <system_error>

#include <fmt/format.h>
#include <sys/eventfd.h>

#include <kvferry/transports/shm/channel.hpp>
#include <kvferry/transports/shm/copy_pool.hpp>

namespace kvferry::shm {

Result<std::unique_ptr<CopyPool>> CopyPool::start(int threads) {
  Fd done_fd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!done_fd) return {Errc::resource_exhausted, fmt::format("shm: eventfd: {}", std::strerror(errno))};
  std::unique_ptr<CopyPool> pool(new CopyPool(std::move(done_fd)));
  try {
    for (int i = 0; i < threads; ++i) pool->threads_.emplace_back([&pool = *pool] { pool.run(); });
  } catch (const std::system_error& error) {
    return {Errc::resource_exhausted, fmt::format("shm: only {} of {} copy threads could be started: {}",
                                                  pool->threads_.size(), threads, error.what())};
  }
  return pool;
}

CopyPool::~CopyPool() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  work_or_end_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void CopyPool::submit(Item* item) {
  {
    const std::lock_guard lock(mutex_);
    waiting_.push(item);
  }
  work_or_end_.notify_one();
}

ItemQueue CopyPool::collect() {
  if (!some_done_.load()) return {};
  const std::lock_guard lock(mutex_);
  some_done_.store(false);
  return std::exchange(done_, ItemQueue());
}

void CopyPool::arm() {
  armed_.store(true);
  // An item that came through just before would otherwise stay unnoticed by a sleeper.
  if (some_done_.load()) ring_if_armed();
}

void CopyPool::quiet_bell() {
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t bytes = ::read(done_fd_.get(), &count, sizeof count);
}

void CopyPool::ring_if_armed() {
  if (!armed_.exchange(false)) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t bytes = ::write(done_fd_.get(), &one, sizeof one);
}

void CopyPool::run() {
  while (Item* item = take()) {
    item->result = item->channel->copy_whole(*item);
    give_back(item);
  }
}

Item* CopyPool::take() {
  std::unique_lock lock(mutex_);
  work_or_end_.wait(lock, [this] { return ending_ || !waiting_.empty(); });
  return ending_ ? nullptr : waiting_.pop();
}

void CopyPool::give_back(Item* item) {
  {
    const std::lock_guard lock(mutex_);
    done_.push(item);
    some_done_.store(true);
  }
  ring_if_armed();
}

}  // namespace kvferry::shm
