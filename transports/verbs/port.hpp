// The verbs Port: its poller's thread drives the channels it opened and serves those of its peers.
#pragma once

#include <cstddef>
#include <memory>
#include <unordered_map>
#include <vector>

#include <kvferry/transports/transport.hpp>
#include <kvferry/transports/verbs/channel.hpp>
#include <kvferry/transports/verbs/port_parts.hpp>
#include <kvferry/transports/verbs/server.hpp>

namespace kvferry::verbs {

class VerbsPort final : public Port {
 public:
  static Result<std::unique_ptr<Port>> open(const VerbsConfig& config, const std::vector<Device>& devices,
                                            const Registrations& registrations, const PortContext& context,
                                            PortEvents& events);
  ~VerbsPort() override;

  PortLimits limits() const override;
  std::string address() const override { return address_; }
  Result<ChannelId> open(const ChannelSpec& spec) override;
  std::uint64_t detour_bytes(ChannelId channel, const RegionRecord& local) const override;
  std::size_t post(ChannelId channel, std::span<const WorkItem> items) override;
  void cancel(ChannelId channel, std::uint64_t cookie) override;
  void fence(ChannelId channel, const Status& why) override;
  std::size_t poll(std::span<Completion> completions) override;
  void on_answer(ChannelId channel, const Result<std::string>& answer) override;
  Result<std::string> serve(std::string_view request) override;
  Progress progress() const override;
  int wait_fd() const override { return epoll_; }
  TimePoint next_wakeup() const override;
  bool release_region(RegionKey region, bool force) override;
  void drop_session(SessionId session) override { server_.drop_session(session); }

 private:
  VerbsPort(const VerbsConfig& config, const std::vector<Device>& devices, const Registrations& registrations,
            const PortContext& context, PortEvents& events)
      : parts_(config, devices, registrations, context, events), server_(parts_) {}
  Status start();
  Status start_cm();
  Status watch(int fd);

  Channel* find(ChannelId id);
  void look_at_device(DeviceSide& side);
  std::size_t take_completions(DeviceSide& side);
  void handle(DeviceSide& side, const ibv_wc& completion);
  void on_arrival(DeviceSide& side, const ibv_wc& completion);
  void work_on_busy();
  void hand_over_requests();
  void tick_channels();

  PortParts parts_;
  Server server_;
  std::string address_;
  int epoll_ = -1;
  std::unordered_map<ChannelId, std::unique_ptr<Channel>> channels_;
  std::unordered_map<std::uint64_t, Channel*> by_wire_id_;
  std::vector<Channel*> busy_;  ///< those with items: an engine may know thousands of peers
  ChannelId next_channel_ = 1;
  std::size_t changing_ = 0;  ///< channels that connect or end
  std::vector<std::pair<ChannelId, Result<std::string>>> answers_;
  std::uint32_t polls_ = 0;
  mutable bool slept_ = false;
  mutable std::vector<std::pair<DeviceSide*, ibv_wc>> stash_;  ///< completions found when going to sleep
};

}  // namespace kvferry::verbs
