// The pollers of two engines on simulated RDMA devices, stepped by one thread: the whole path of a transfer but for
// the actors around it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvferry/actors/poller_core.hpp>
#include <kvferry/runtime/region_table.hpp>
#include <kvferry/transports/verbs/topology.hpp>
#include <kvferry/transports/verbs/verbs_transport.hpp>

#include "tests/support/scripted_nic.hpp"

namespace kvferry::test {

/// One engine's share.
class CoreSide final : public PollerEvents {
 public:
  CoreSide(std::uint64_t incarnation, const VerbsConfig& config_of_verbs, ScriptedNic& nic,
           const verbs::Topology& topology);
  ~CoreSide() override;

  std::shared_ptr<const RegionRecord> add_region(const std::string& name, std::uint64_t bytes);
  std::shared_ptr<const RegionRecord> add_region(std::unique_ptr<RegionRecord> record);
  /// What a peer would know of a region.
  std::shared_ptr<const RemoteRegion> remote_view(const RegionRecord& region) const;

  void rail_up(std::uint32_t, std::uint32_t rail) override { up.push_back(rail); }
  void rail_down(std::uint32_t, std::uint32_t rail, const Status& why) override { down.emplace_back(rail, why); }
  void orphaned(RefPtr<TransferState> transfer, const Status& why) override { transfer->complete(why); }
  void request(const PortRequest& request) override { requests.push_back(request); }

  EngineConfig config;
  PeerTable peers;
  RegionTable regions;
  MetricCounters metrics;
  std::vector<std::uint32_t> up;
  std::vector<std::pair<std::uint32_t, Status>> down;
  std::vector<PortRequest> requests;
  std::shared_ptr<Transport> transport;
  std::shared_ptr<Submissions> submissions;
  std::unique_ptr<PollerCore> core;

 private:
  NotificationQueue notifications_;
  std::vector<std::shared_ptr<const RegionRecord>> records_;
  std::vector<std::pair<std::string, std::string>> descriptors_;  ///< by name of the region
};

/// An initiator and a target whose devices are joined one by one.
class CorePair {
 public:
  /// The first `rails` devices of the network are the initiator's, as many others the target's.
  CorePair(ScriptedNic& nic, std::uint32_t rails, VerbsConfig config = {},
           const verbs::Topology& topology = verbs::Topology());

  /// The name of a device of either side: `a0`, `a1` ... are the initiator's, `b0` ... the target's.
  static std::vector<NicDevice> devices(std::uint32_t rails);

  /// Opens one rail per device and waits until they are up; throws StatusError when they do not come up.
  void open_rails();
  /// Equal regions on both sides, their pages not yet touched.
  void add_regions(std::uint64_t bytes);
  void use_regions(std::shared_ptr<const RegionRecord> ours, std::shared_ptr<const RegionRecord> theirs);
  RefPtr<TransferState> submit(Op op, std::span<const Slice> slices);
  /// One round of both pollers and of what their engines carry between them.
  void step();

  CoreSide initiator;
  CoreSide target;
  std::shared_ptr<const RegionRecord> local;
  std::shared_ptr<const RegionRecord> served;

 private:
  void carry_requests();

  ScriptedNic& nic_;
  const std::uint32_t rails_;
  std::shared_ptr<PeerRecord> peer_;
  Token token_{};
  std::shared_ptr<const RemoteRegion> remote_;
};

}  // namespace kvferry::test
