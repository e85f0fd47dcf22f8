// The scheduler actor: rail health, routes, cool-down and the transfers that concern several groups.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include <kvferry/actors/caf.hpp>

namespace kvferry {

/// One way into each poller.
struct GroupHandle {
  caf::actor poller;
  std::shared_ptr<Submissions> submissions;
};
struct SetGroups {
  std::vector<GroupHandle> groups;
};

/// Picks the group with the least work for this peer; nullptr-safe: returns nothing without a route.
std::optional<std::uint32_t> pick_group(const PeerRecord& peer);

/// One per engine, on the pool. Sees everything that is not a batch: rails going up and down,
/// transfers whose group has lost its rails, transfers worth several groups.
class SchedulerActor final : public caf::event_based_actor {
 public:
  /// A rail that failed rests this long, doubled with every further failure up to the last.
  static constexpr auto first_cool_down = std::chrono::milliseconds(100);
  static constexpr auto last_cool_down = std::chrono::milliseconds(5000);

  SchedulerActor(caf::actor_config& config, Duration connect_timeout);
  caf::behavior make_behavior() override;

 private:
  struct RailState {
    RailPlan plan;
    bool up = false;
    bool tried = false;
    bool cooling = false;
    std::uint32_t failures = 0;
    TimePoint up_since{};
    Status why;
  };
  struct PeerState {
    PeerPtr record;
    caf::actor endpoint;
    std::map<std::uint32_t, RailState> rails;
  };

  void add_peer(const AddPeer& add);
  void remove_peer(const RemovePeer& remove);
  void on_report(const RailReport& report);
  void reopen(const ReopenRail& again);
  void relay(const AskPort& ask);
  void reroute(const Orphan& orphan);
  void split(const SplitTransfer& request);
  void open(std::uint32_t peer, RailState& rail);
  void publish(PeerState& peer);

  const Duration connect_timeout_;
  std::uint32_t next_rail_ = 1;
  std::vector<GroupHandle> groups_;
  std::map<std::uint32_t, PeerState> peers_;
};

}  // namespace kvferry

CAF_ALLOW_UNSAFE_MESSAGE_TYPE(kvferry::SetGroups)
