// One poller thread's event loop over the sockets of a port: epoll, edge-triggered.
#pragma once

#include <array>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <sys/uio.h>

#include <kvferry/runtime/status.hpp>

#include "socket.hpp"

namespace kvferry::tcp {

/// Something with a descriptor in the loop.
class Watched {
 public:
  virtual ~Watched() = default;
  /// epoll reported `events`; only notes them, work is done in run().
  virtual void on_events(std::uint32_t events) = 0;
  /// Does a bounded portion; true when there is more to do right now.
  virtual bool run() = 0;

 private:
  friend class Loop;
  bool scheduled_ = false;
};

class Loop {
 public:
  static constexpr std::size_t staging_bytes = 16 << 10;

  Loop();
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  Status open();
  int fd() const noexcept { return epoll_.get(); }
  Status watch(int fd, std::uint32_t events, Watched& watched);
  /// Changes what is reported; 0 for nothing.
  void rewatch(int fd, std::uint32_t events, Watched& watched) noexcept;

  /// Before the descriptor is closed: where a child of fork() has a copy of it, closing alone would leave it
  /// in the loop, and its events would go to whoever has died meanwhile.
  void unwatch(int fd) noexcept;

  /// Runs `watched` from the next turn on, until it says that it is done.
  void schedule(Watched& watched);
  /// Keeps a closed object until no list of the loop can name it any more.
  void bury(std::unique_ptr<Watched> closed);
  /// `bytes` came from `watched`: it is likeliest to have something next, and will be asked directly,
  /// which is cheaper than epoll.
  void favour(Watched& watched, std::size_t bytes) noexcept;

  /// Collects events and runs everything that has work, each a bounded number of times.
  void turn();
  bool has_work() const noexcept { return !runnable_.empty(); }

  /// Scratch for building one system call: valid until the next use by anyone.
  std::array<iovec, IOV_MAX + 1>& iovecs() noexcept { return iovecs_; }
  /// Where bytes land whose destination is not known yet: emptied before the next use.
  std::array<std::byte, staging_bytes>& staging() noexcept { return *staging_; }

 private:
  void collect();
  void run_scheduled();

  Fd epoll_;
  Watched* favourite_ = nullptr;
  Watched* latest_ = nullptr;  ///< the last that received, unless it was bulk
  unsigned favoured_turns_ = 0;
  std::vector<Watched*> runnable_;
  std::vector<Watched*> running_;
  std::vector<std::unique_ptr<Watched>> buried_;
  std::array<iovec, IOV_MAX + 1> iovecs_{};
  std::unique_ptr<std::array<std::byte, staging_bytes>> staging_;
};

}  // namespace kvferry::tcp
