#include "loop.hpp"

#include <algorithm>
#include <cerrno>
#include <utility>

#include <fmt/format.h>
#include <sys/epoll.h>

namespace kvferry::tcp {
namespace {

constexpr int events_per_turn = 64;
// For so many turns after the favourite had something, everybody else is looked at only in every
// collect_interval-th: in a ping-pong the answer is found half an epoll_wait earlier.
constexpr unsigned favoured_turns = 64;
constexpr unsigned collect_interval = 16;

}  // namespace

Loop::Loop() : staging_(std::make_unique<std::array<std::byte, staging_bytes>>()) {}

Status Loop::open() {
  epoll_ = Fd(::epoll_create1(EPOLL_CLOEXEC));
  if (epoll_) return {};
  return {Errc::resource_exhausted, fmt::format("tcp: no epoll descriptor: {}", errno_text(errno))};
}

Status Loop::watch(int fd, std::uint32_t events, Watched& watched) {
  epoll_event event{.events = events, .data = {.ptr = &watched}};
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0) return {};
  return {Errc::resource_exhausted, fmt::format("tcp: epoll takes no more descriptors: {} "
                                                "(fs.epoll.max_user_watches)",
                                                errno_text(errno))};
}

void Loop::rewatch(int fd, std::uint32_t events, Watched& watched) noexcept {
  epoll_event event{.events = events, .data = {.ptr = &watched}};
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void Loop::unwatch(int fd) noexcept { ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

void Loop::schedule(Watched& watched) {
  if (watched.scheduled_) return;
  watched.scheduled_ = true;
  runnable_.push_back(&watched);
}

// Twice in a row the same one, with little: it is a ping-pong. Several in turn are the parts of one large transfer,
// and bulk makes a turn long: then everybody must have theirs.
void Loop::favour(Watched& watched, std::size_t bytes) noexcept {
  const bool bulk = bytes > staging_bytes;
  const bool again = std::exchange(latest_, bulk ? nullptr : &watched) == &watched;
  favourite_ = again && !bulk ? &watched : nullptr;
  if (favourite_ == nullptr) {
    favoured_turns_ = 0;
  } else if (favoured_turns_ == 0) {
    favoured_turns_ = favoured_turns;
  }
}

void Loop::bury(std::unique_ptr<Watched> closed) {
  if (favourite_ == closed.get()) favourite_ = nullptr;
  if (latest_ == closed.get()) latest_ = nullptr;
  buried_.push_back(std::move(closed));
}

void Loop::turn() {
  if (favourite_ != nullptr) favourite_->on_events(EPOLLIN);
  run_scheduled();
  if (favoured_turns_ > 0 && favoured_turns_-- % collect_interval != 0) return;
  collect();
  run_scheduled();
}

void Loop::collect() {
  std::array<epoll_event, events_per_turn> events;
  const int count = ::epoll_wait(epoll_.get(), events.data(), events_per_turn, 0);
  for (int i = 0; i < count; ++i) static_cast<Watched*>(events[i].data.ptr)->on_events(events[i].events);
}

void Loop::run_scheduled() {
  running_.swap(runnable_);
  for (Watched* watched : running_) {
    watched->scheduled_ = false;
    if (watched->run()) schedule(*watched);
  }
  running_.clear();
  std::erase_if(buried_, [](const std::unique_ptr<Watched>& closed) { return !closed->scheduled_; });
}

}  // namespace kvferry::tcp
