// A poller's share of the TCP transport: both sides on one event loop.
#pragma once

#include <memory>

#include <kvferry/runtime/config.hpp>
#include <kvferry/transports/transport.hpp>

#include "initiator.hpp"
#include "loop.hpp"
#include "server.hpp"

namespace kvferry::tcp {

class TcpPort final : public Port {
 public:
  static Result<std::unique_ptr<Port>> open(const TcpConfig& config, const PortContext& context, PortEvents& events);

  TcpPort(const TcpConfig& config, const PortContext& context, PortEvents& events);

  PortLimits limits() const override { return limits_of(config_); }
  std::string address() const override { return server_.address(); }
  Result<ChannelId> open(const ChannelSpec& spec) override { return initiator_.open(spec); }
  std::size_t post(ChannelId channel, std::span<const WorkItem> items) override {
    return initiator_.post(channel, items);
  }
  void cancel(ChannelId channel, std::uint64_t cookie) override { initiator_.cancel(channel, cookie); }
  void fence(ChannelId channel, const Status& why) override { initiator_.fence(channel, why); }
  std::size_t poll(std::span<Completion> completions) override;
  Progress progress() const override;
  int wait_fd() const override { return loop_.fd(); }
  TimePoint next_wakeup() const override;
  bool release_region(RegionKey region, bool force) override { return server_.release_region(region, force); }
  void drop_session(SessionId session) override { server_.drop_session(session); }

 private:
  const TcpConfig config_;
  PortEvents& events_;
  Loop loop_;
  Server server_;
  Initiator initiator_;
};

}  // namespace kvferry::tcp
