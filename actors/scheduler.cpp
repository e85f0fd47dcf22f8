#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include <kvferry/actors/scheduler.hpp>
#include <kvferry/actors/split_transfer.hpp>
#include <kvferry/runtime/log.hpp>

namespace kvferry {

std::optional<std::uint32_t> pick_group(const PeerRecord& peer) {
  const auto route = peer.route();
  if (!route || route->groups.empty()) return std::nullopt;
  return *std::min_element(route->groups.begin(), route->groups.end(), [&](std::uint32_t a, std::uint32_t b) {
    return peer.backlog[a].load(std::memory_order_relaxed) < peer.backlog[b].load(std::memory_order_relaxed);
  });
}

SchedulerActor::SchedulerActor(caf::actor_config& config, Duration connect_timeout)
    : caf::event_based_actor(config), connect_timeout_(connect_timeout) {}

caf::behavior SchedulerActor::make_behavior() {
  return {[this](const SetGroups& set) { groups_ = set.groups; },
          [this](const AddPeer& add) { add_peer(add); },
          [this](const RemovePeer& remove) { remove_peer(remove); },
          [this](const RailReport& report) { on_report(report); },
          [this](const ReopenRail& again) { reopen(again); },
          [this](const Orphan& orphan) { reroute(orphan); },
          [this](const AskPort& ask) { relay(ask); },
          [this](const SplitTransfer& request) { split(request); },
          [this](StopScheduler) { quit(); }};
}

void SchedulerActor::add_peer(const AddPeer& add) {
  PeerState& peer = peers_[add.peer->slot];
  peer.record = add.peer;
  peer.endpoint = add.endpoint;
  if (peer.rails.empty()) {
    for (RailPlan plan : add.rails) {
      plan.spec.rail = next_rail_++;
      peer.rails[plan.spec.rail].plan = plan;
    }
  } else {
    // A renewed handshake of the same life: new tokens for rails that are to be opened again.
    auto place = peer.rails.begin();
    for (const RailPlan& plan : add.rails) {
      if (place == peer.rails.end()) break;
      place->second.plan.spec.channel = plan.spec.channel;
      ++place;
    }
  }
  for (auto& [number, rail] : peer.rails) {
    if (rail.up) continue;
    // What became of it before this handshake says nothing about it now.
    rail.tried = false;
    rail.why = {};
    open(add.peer->slot, rail);
  }
  publish(peer);
}

void SchedulerActor::open(std::uint32_t peer, RailState& rail) {
  rail.cooling = false;
  rail.plan.spec.channel.give_up = clock().now() + connect_timeout_;
  send(groups_[rail.plan.group].poller, OpenRail{peer, rail.plan.spec});
}

void SchedulerActor::remove_peer(const RemovePeer& remove) {
  const auto found = peers_.find(remove.peer);
  if (found != peers_.end()) {
    found->second.record->set_route(nullptr);
    peers_.erase(found);
  }
  for (const auto& group : groups_) send(group.poller, ClosePeer{remove.peer, remove.why});
}

void SchedulerActor::on_report(const RailReport& report) {
  const auto found = peers_.find(report.peer);
  if (found == peers_.end()) return;
  PeerState& peer = found->second;
  const auto place = peer.rails.find(report.rail);
  if (place == peer.rails.end()) return;
  RailState& rail = place->second;
  const TimePoint now = clock().now();
  rail.tried = true;
  if (report.up) {
    rail.up = true;
    rail.up_since = now;
    log(LogLevel::info,
        fmt::format("rail {} ({}) to peer '{}' is up", report.rail, rail.plan.spec.transport, peer.record->name));
  } else {
    // A rail that worked for long starts over with short rests.
    if (rail.up && now - rail.up_since > last_cool_down) rail.failures = 0;
    rail.up = false;
    rail.why = report.why;
    const auto rest = std::min<Duration>(last_cool_down, first_cool_down * (1u << std::min(rail.failures, 6u)));
    ++rail.failures;
    if (!rail.cooling) {
      rail.cooling = true;
      log(LogLevel::debug,
          fmt::format("rail {} ({}) to peer '{}' is down, tried again in {} ms: {}", report.rail,
                      rail.plan.spec.transport, peer.record->name,
                      std::chrono::duration_cast<std::chrono::milliseconds>(rest).count(), report.why.to_string()));
      delayed_send(this, rest, ReopenRail{report.peer, report.rail});
    }
  }
  publish(peer);
}

void SchedulerActor::reopen(const ReopenRail& again) {
  const auto found = peers_.find(again.peer);
  if (found == peers_.end()) return;
  const auto place = found->second.rails.find(again.rail);
  if (place == found->second.rails.end() || place->second.up || !place->second.cooling) return;
  // Said once, and only now: a peer that ends in good order takes its rails with it before it is forgotten.
  if (place->second.failures == 1)
    log(LogLevel::warning,
        fmt::format("rail {} ({}) to peer '{}' went down and is tried again: {}", again.rail,
                    place->second.plan.spec.transport, found->second.record->name, place->second.why.to_string()));
  open(again.peer, place->second);
}

void SchedulerActor::publish(PeerState& peer) {
  auto route = std::make_shared<Route>();
  RailsChanged changed;
  changed.peer = peer.record->slot;
  changed.settled = true;
  std::uint32_t best = UINT32_MAX;
  for (const auto& [number, rail] : peer.rails)
    if (rail.up) best = std::min(best, rail.plan.spec.tier);
  std::vector<std::string> names;
  std::string errors;
  Errc code = Errc::no_path;
  std::uint32_t best_tier = 0;
  for (const auto& [number, rail] : peer.rails) {
    changed.settled &= rail.tried || rail.plan.spec.tier > best;
    if (!rail.up) {
      if (rail.why.is_ok()) continue;
      errors += fmt::format("{}{}: {}", errors.empty() ? "" : "; ", rail.plan.spec.transport, rail.why.text());
      // A peer that refuses every rail for one reason is refused for that reason.
      if (rail.why == Errc::stale_peer || rail.why == Errc::access_denied || rail.why == Errc::version_mismatch)
        code = rail.why.code();
      continue;
    }
    if (!changed.up || rail.plan.spec.tier < best_tier) {
      best_tier = rail.plan.spec.tier;
      peer.record->one_sided.store(rail.plan.spec.one_sided, std::memory_order_relaxed);
    }
    changed.up = true;
    if (std::find(route->groups.begin(), route->groups.end(), rail.plan.group) == route->groups.end())
      route->groups.push_back(rail.plan.group);
    if (std::find(names.begin(), names.end(), rail.plan.spec.transport) == names.end())
      names.push_back(rail.plan.spec.transport);
  }
  route->text = fmt::format("{}", fmt::join(names, ", "));
  if (!changed.up)
    changed.why = {code, fmt::format("no rail to peer '{}' is up ({})", peer.record->name,
                                     errors.empty() ? "none has been tried yet" : errors)};
  peer.record->set_route(std::move(route));
  send(peer.endpoint, changed);
}

void SchedulerActor::relay(const AskPort& ask) {
  const auto found = peers_.find(ask.request.peer);
  // The peer is gone, and with it whoever could answer: the port's own limits end what it asked for.
  if (found != peers_.end()) send(found->second.endpoint, RelayRequest{groups_[ask.group].poller, ask.request});
}

void SchedulerActor::reroute(const Orphan& orphan) {
  const auto found = peers_.find(orphan.transfer->peer_slot);
  if (found == peers_.end()) {
    orphan.transfer->complete(orphan.why);
    return;
  }
  PeerRecord& peer = *found->second.record;
  const std::uint32_t group = pick_group(peer).value_or(orphan.group);
  peer.backlog[group].fetch_add(orphan.transfer->backlog, std::memory_order_relaxed);
  if (!groups_[group].submissions->push(orphan.transfer)) orphan.transfer->complete(orphan.why);
}

void SchedulerActor::split(const SplitTransfer& request) {
  TransferState& whole = *request.transfer;
  auto owner = std::static_pointer_cast<SplitOwner>(whole.owner());
  const auto route = request.peer->route();
  std::vector<std::uint32_t> groups = route ? route->groups : std::vector<std::uint32_t>{};
  if (groups.empty()) groups.push_back(0);
  std::vector<std::pair<std::uint32_t, RefPtr<TransferState>>> parts;
  for (const auto& run : SplitOwner::cut(whole.slices(), groups.size())) {
    const std::uint32_t group = groups[parts.size() % groups.size()];
    TransferState::Request part;
    part.op = whole.op();
    part.priority = whole.priority();
    part.deadline = whole.deadline();
    part.local = whole.shared_local();
    part.remote = whole.remote();
    part.slices = run;
    part.owner = owner->base();
    auto state = TransferState::create(std::move(part));
    state->peer_slot = whole.peer_slot;
    state->submitted_at = whole.submitted_at;
    state->backlog = state->bytes();
    owner->add(state);
    parts.emplace_back(group, std::move(state));
  }
  SplitOwner::watch(owner, request.transfer);
  for (auto& [group, part] : parts) {
    request.peer->backlog[group].fetch_add(part->backlog, std::memory_order_relaxed);
    if (owner->cancelled()) part->cancel();
    if (!groups_[group].submissions->push(part)) part->complete({Errc::shutting_down, "the engine is being destroyed"});
  }
}

}  // namespace kvferry
