// The target's side of a port: listens, and owns the connections it accepted.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include <kvferry/runtime/config.hpp>
#include <kvferry/transports/transport.hpp>

#include "answer.hpp"
#include "loop.hpp"
#include "server_connection.hpp"

namespace kvferry::tcp {

class Server final : public ConnectionHost, private Watched {
 public:
  Server(Loop& loop, const PortContext& context, PortEvents& events)
      : loop_(loop), context_(context), events_(events) {}

  Status listen(const TcpConfig& config);
  const std::string& address() const noexcept { return address_; }

  /// See Port::release_region.
  bool release_region(RegionKey region, bool force);
  void drop_session(SessionId session);

  /// Offers stalled notifications and messages again.
  void retry_stalled();
  bool has_timers() const noexcept;
  void run_timers(TimePoint now);
  TimePoint next_wakeup() const noexcept;
  /// Requests are being received or answered.
  bool busy() const noexcept { return answers_.in_use() > 0; }

  // ---- ConnectionHost
  const PortContext& context() const override { return context_; }
  PortEvents& events() override { return events_; }
  AnswerPool& answers() override { return answers_; }
  void on_authenticated(ServerConnection& connection) override;
  void fence(const Hello& fence) override;
  void on_closed(ServerConnection& connection) override;

 private:
  // ---- Watched: the listening socket
  void on_events(std::uint32_t events) override;
  bool run() override;

  bool accept_one();
  void admit(Fd fd, const Endpoint& peer);
  void pause_accepting(int error);
  void forget_stranger(const ServerConnection& connection);
  template <class Predicate>
  void drop_where(Predicate&& predicate, const Status& why);

  Loop& loop_;
  const PortContext context_;
  PortEvents& events_;
  AnswerPool answers_;  // outlives the connections, which give answers back
  Fd listener_;
  std::string address_;
  std::vector<std::unique_ptr<ServerConnection>> connections_;
  std::deque<ServerConnection*> strangers_;  // accepted, hello not complete; oldest first
  bool accepting_ = true;
  bool accept_trouble_ = false;  // logged already
  TimePoint accept_again_{};
  TimePoint last_retry_{};
};

}  // namespace kvferry::tcp
