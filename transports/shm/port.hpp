// The shared-memory Port: its poller's thread drives the channels it opened and the server.
#pragma once

#include <cstddef>
#include <memory>
#include <unordered_map>

#include <kvferry/transports/shm/channel.hpp>
#include <kvferry/transports/shm/port_parts.hpp>
#include <kvferry/transports/shm/server.hpp>
#include <kvferry/transports/transport.hpp>

namespace kvferry::shm {

class ShmPort final : public Port {
 public:
  static Result<std::unique_ptr<Port>> open(const ShmConfig& config, const Options& options, const PortContext& context,
                                            PortEvents& events);
  ~ShmPort() override;

  PortLimits limits() const override;
  std::string address() const override { return server_->address(); }
  Result<ChannelId> open(const ChannelSpec& spec) override;
  std::size_t post(ChannelId channel, std::span<const WorkItem> items) override;
  void cancel(ChannelId channel, std::uint64_t cookie) override;
  void fence(ChannelId channel, const Status& why) override;
  std::size_t poll(std::span<Completion> completions) override;
  Progress progress() const override;
  int wait_fd() const override { return parts_.epoll.fd(); }
  TimePoint next_wakeup() const override;
  bool release_region(RegionKey region, bool force) override { return server_->release_region(region, force); }
  void drop_session(SessionId session) override { server_->drop_session(session); }

 private:
  ShmPort(const ShmConfig& config, const Options& options, const PortContext& context, PortEvents& events)
      : parts_(config, options, context, events) {}
  Status start();

  Channel* find(ChannelId id);
  std::uint64_t run_channels();
  void collect_from_helpers();
  void collect_from_waiters();
  void look_at_sockets();
  void report_ended_channels();

  PortParts parts_;
  std::unique_ptr<Server> server_;
  std::unordered_map<ChannelId, std::unique_ptr<Channel>> channels_;
  ChannelId next_channel_ = 1;
  std::size_t turn_ = 0;        ///< whose portion is next in PortParts::active
  std::size_t connecting_ = 0;  ///< channels that were so at the last look
  std::int64_t polls_per_look_ = 1;
  std::int64_t until_look_ = 0;  ///< work left before the sockets are looked at again
  mutable bool about_to_sleep_ = false;
};

}  // namespace kvferry::shm
