// The descriptors that one Port waits for.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include <sys/epoll.h>
#include <sys/socket.h>

#include <kvferry/transports/shm/fd.hpp>

namespace kvferry::shm {

enum class Watched : std::uint8_t { listener, connection, channel, process, helpers };

/// Level-triggered; every descriptor has a kind and a number by which its owner is found.
class EpollSet {
 public:
  EpollSet() : fd_(::epoll_create1(EPOLL_CLOEXEC)) {}
  int fd() const noexcept { return fd_.get(); }

  bool add(int fd, Watched what, std::uint32_t id, std::uint32_t events) noexcept {
    return control(EPOLL_CTL_ADD, fd, what, id, events);
  }
  bool change(int fd, Watched what, std::uint32_t id, std::uint32_t events) noexcept {
    return control(EPOLL_CTL_MOD, fd, what, id, events);
  }
  void remove(int fd) noexcept { ::epoll_ctl(fd_.get(), EPOLL_CTL_DEL, fd, nullptr); }
  /// Removes a connected socket that is about to be closed. Copies of it in children of fork() must not keep
  /// the connection alive.
  void hang_up(int fd) noexcept {
    remove(fd);
    ::shutdown(fd, SHUT_RDWR);
  }

  /// Calls visit(what, id, events) for what is ready, at most 64 descriptors; never waits.
  template <class Visit>
  void look(Visit&& visit) {
    std::array<epoll_event, 64> events;
    const int count = ::epoll_wait(fd_.get(), events.data(), static_cast<int>(events.size()), 0);
    for (int i = 0; i < count; ++i)
      visit(static_cast<Watched>(events[i].data.u64 >> 32), static_cast<std::uint32_t>(events[i].data.u64),
            events[i].events);
  }

 private:
  bool control(int operation, int fd, Watched what, std::uint32_t id, std::uint32_t events) noexcept {
    epoll_event event{};
    event.events = events;
    event.data.u64 = static_cast<std::uint64_t>(what) << 32 | id;
    return ::epoll_ctl(fd_.get(), operation, fd, &event) == 0;
  }

  Fd fd_;
};

}  // namespace kvferry::shm
