#include "tests/support/core_pair.hpp"

#include <chrono>

#include <fmt/format.h>

namespace kvferry::test {
namespace {

constexpr std::uint64_t initiators_life = 1;
constexpr std::uint64_t targets_life = 2;
constexpr int most_steps_to_open = 1'000'000;

VerbsConfig on_devices(VerbsConfig config, char side, std::uint32_t count) {
  for (std::uint32_t i = 0; i < count; ++i) config.devices.push_back(fmt::format("{}{}", side, i));
  return config;
}

}  // namespace

// ---------------------------------------------------------------- CoreSide

CoreSide::CoreSide(std::uint64_t incarnation, const VerbsConfig& config_of_verbs, ScriptedNic& nic,
                   const verbs::Topology& topology)
    : peers(incarnation) {
  transport = make_verbs_transport(config_of_verbs, nic, topology).value();
  submissions = std::make_shared<Submissions>([](std::function<void()> task) { task(); });
  PollerCore::Parts parts;
  parts.config = &config;
  parts.peers = &peers;
  parts.notifications = &notifications_;
  parts.regions = &regions;
  parts.metrics = &metrics;
  parts.submissions = submissions.get();
  parts.events = this;
  core = std::make_unique<PollerCore>(parts);
  PortContext context;
  context.regions = &regions;
  context.incarnation = incarnation;
  if (Status status = core->add_port(*transport, context); !status) throw StatusError(status);
}

CoreSide::~CoreSide() {
  core.reset();
  for (const auto& record : records_) transport->unregister_region(*record);
}

std::shared_ptr<const RegionRecord> CoreSide::add_region(const std::string& name, std::uint64_t bytes) {
  return add_region(allocate_region(name, bytes, Access::read_write).value());
}

std::shared_ptr<const RegionRecord> CoreSide::add_region(std::unique_ptr<RegionRecord> fresh) {
  auto record = regions.add(std::move(fresh)).value();
  descriptors_.emplace_back(record->name, transport->register_region(*record).value());
  records_.push_back(record);
  return record;
}

std::shared_ptr<const RemoteRegion> CoreSide::remote_view(const RegionRecord& region) const {
  auto view = std::make_shared<RemoteRegion>();
  view->key = region.key;
  view->name = region.name;
  view->size = region.size;
  view->access = region.access;
  for (const auto& [name, descriptor] : descriptors_)
    if (name == region.name) view->descriptors.emplace_back("verbs", descriptor);
  return view;
}

// ---------------------------------------------------------------- CorePair

CorePair::CorePair(ScriptedNic& nic, std::uint32_t rails, VerbsConfig config, const verbs::Topology& topology)
    : initiator(initiators_life, on_devices(config, 'a', rails), nic, topology),
      target(targets_life, on_devices(config, 'b', rails), nic, topology),
      nic_(nic),
      rails_(rails) {
  peer_ = initiator.peers.find_or_add("target", targets_life);
  peer_->set_state(PeerState::up);
  token_ = target.peers.open_session(target.peers.find_or_add("initiator", initiators_life), nic_.now());
}

std::vector<NicDevice> CorePair::devices(std::uint32_t rails) {
  std::vector<NicDevice> made;
  for (const char side : {'a', 'b'})
    for (std::uint32_t i = 0; i < rails; ++i) made.push_back({.name = fmt::format("{}{}", side, i)});
  return made;
}

void CorePair::open_rails() {
  for (std::uint32_t i = 0; i < rails_; ++i) {
    RailSpec spec;
    spec.rail = i;
    spec.transport = "verbs";
    spec.one_sided = true;
    spec.channel.address = target.core->adverts().front().address;
    spec.channel.token = token_;
    spec.channel.target_incarnation = targets_life;
    spec.channel.give_up = nic_.now() + std::chrono::seconds(5);
    spec.channel.path = i;
    initiator.core->open_rail(peer_->slot, spec);
  }
  for (int i = 0; initiator.up.size() < rails_; ++i) {
    if (!initiator.down.empty()) throw StatusError(initiator.down.front().second);
    if (i == most_steps_to_open) throw StatusError({Errc::timed_out, "the rails do not come up"});
    step();
  }
}

void CorePair::add_regions(std::uint64_t bytes) {
  use_regions(initiator.add_region("local", bytes), target.add_region("served", bytes));
}

void CorePair::use_regions(std::shared_ptr<const RegionRecord> ours, std::shared_ptr<const RegionRecord> theirs) {
  local = std::move(ours);
  served = std::move(theirs);
  remote_ = target.remote_view(*served);
}

RefPtr<TransferState> CorePair::submit(Op op, std::span<const Slice> slices) {
  TransferState::Request request;
  request.op = op;
  request.deadline = nic_.now() + std::chrono::seconds(30);
  request.local = local;
  request.remote = remote_;
  request.slices = slices;
  request.owner = initiator.submissions;
  auto state = TransferState::create(std::move(request));
  state->peer_slot = peer_->slot;
  state->submitted_at = nic_.now();
  if (!initiator.submissions->push(state)) throw StatusError({Errc::shutting_down, "the poller has stopped"});
  return state;
}

void CorePair::step() {
  const TimePoint now = nic_.now();
  initiator.core->step(now);
  target.core->step(now);
  carry_requests();
}

void CorePair::carry_requests() {
  for (const PortRequest& request : std::exchange(initiator.requests, {}))
    initiator.core->on_answer(request.transport, request.channel,
                              target.core->serve(request.transport, request.address, request.bytes));
}

}  // namespace kvferry::test
