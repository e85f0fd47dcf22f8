// The initiator's side of a port: its channels, their completions and events.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include <kvferry/runtime/config.hpp>
#include <kvferry/transports/transport.hpp>

#include "channel.hpp"
#include "fence.hpp"
#include "item.hpp"
#include "loop.hpp"

namespace kvferry::tcp {

class Initiator final : public ChannelHost {
 public:
  Initiator(Loop& loop, const TcpConfig& config, Duration fence_limit)
      : loop_(loop), config_(config), fence_limit_(fence_limit) {}
  ~Initiator() override;

  Result<ChannelId> open(const ChannelSpec& spec);
  std::size_t post(ChannelId channel, std::span<const WorkItem> works);
  void cancel(ChannelId channel, std::uint64_t cookie);
  void fence(ChannelId channel, const Status& why);

  bool has_timers() const noexcept { return connecting_ > 0 || !fences_.empty(); }
  void run_timers(TimePoint now);
  TimePoint next_wakeup() const noexcept;
  /// Reports what happened since the last call.
  void deliver_events(PortEvents& events);
  std::size_t take_completions(std::span<Completion> completions);
  /// Something waits for deliver_events or take_completions.
  bool has_news() const noexcept { return !events_.empty() || next_completion_ < completions_.size(); }
  /// Something waits for a peer.
  bool busy() const noexcept { return items_.in_use() > 0 || has_timers(); }

  // ---- ChannelHost
  ItemPool& items() override { return items_; }
  void on_up(Channel& channel) override;
  void on_completion(std::uint64_t cookie, const Status& status) override { completions_.push_back({cookie, status}); }
  void on_lost(Channel& channel, const Status& why) override;

 private:
  struct Event {
    ChannelId channel = 0;
    std::optional<Status> down;  ///< nothing: up
  };

  Channel* find(ChannelId channel) const;
  void settle_fences();
  void give_up_late_connects(TimePoint now);

  Loop& loop_;
  const TcpConfig& config_;
  const Duration fence_limit_;
  ItemPool items_;
  ChannelId next_channel_ = 1;
  std::unordered_map<ChannelId, std::unique_ptr<Channel>> channels_;
  std::size_t connecting_ = 0;
  std::vector<std::unique_ptr<Channel>> ended_;  // kept until no call is inside them
  std::vector<std::unique_ptr<Fence>> fences_;
  std::vector<Event> events_;
  std::vector<Event> delivering_;
  std::vector<Completion> completions_;
  std::size_t next_completion_ = 0;
};

}  // namespace kvferry::tcp
