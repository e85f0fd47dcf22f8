#include "loop.hpp"

#include <algorithm>
#include <cerrno>

#include <fmt/format.h>
#include <sys/epoll.h>

namespace kvferry::tcp {
namespace {

constexpr int events_per_turn = 64;
// While the favourite has something every time, everybody else is looked at every so many turns.
constexpr unsigned favourite_turns = 4;

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

void Loop::schedule(Watched& watched) {
  if (watched.scheduled_) return;
  watched.scheduled_ = true;
  runnable_.push_back(&watched);
}

void Loop::bury(std::unique_ptr<Watched> closed) {
  if (favourite_ == closed.get()) favourite_ = nullptr;
  buried_.push_back(std::move(closed));
}

void Loop::turn() {
  favourite_hit_ = false;
  if (favourite_ != nullptr) favourite_->on_events(EPOLLIN);
  run_scheduled();
  if (favourite_hit_ && ++turns_since_collect_ < favourite_turns) return;
  collect();
  run_scheduled();
}

void Loop::collect() {
  turns_since_collect_ = 0;
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
