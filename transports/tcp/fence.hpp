// After a channel ended: makes sure that the target applies nothing more of it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <kvferry/runtime/config.hpp>
#include <kvferry/transports/transport.hpp>

#include "client_socket.hpp"

namespace kvferry::tcp {

/// Asks the target, over a connection of its own, to end the channel's connections. Settled once it
/// said so, or once nothing listens at its address (its process is gone, or its port and with it the
/// connections), or at the limit.
class Fence {
 public:
  Fence(Loop& loop, const TcpConfig& config, const Endpoint& peer, const Hello& hello, Status why,
        std::vector<std::uint64_t> cookies, TimePoint limit);
  ~Fence();

  void run_timers(TimePoint now);
  TimePoint next_wakeup() const noexcept;
  bool settled() const noexcept { return settled_; }
  /// Outcome of the items once settled.
  Status outcome() const;
  const std::vector<std::uint64_t>& cookies() const noexcept { return cookies_; }

 private:
  class Socket;

  void ask();
  void on_answer();
  void on_failed(ClientSocket::Failure failure);
  void hang_up() noexcept;

  Loop& loop_;
  const TcpConfig& config_;
  const Endpoint peer_;
  const Hello hello_;
  const Status why_;
  const std::vector<std::uint64_t> cookies_;
  const TimePoint limit_;
  TimePoint ask_again_ = TimePoint::max();
  std::unique_ptr<Socket> socket_;
  bool settled_ = false;
  bool confirmed_ = false;
};

}  // namespace kvferry::tcp
