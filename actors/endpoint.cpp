#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include <kvferry/actors/endpoint.hpp>
#include <kvferry/runtime/log.hpp>

namespace kvferry {
namespace {

// A lost peer is asked for signs of life this long, so that its return or its next life is noticed.
constexpr auto lost_interest = std::chrono::minutes(5);

// High numbers, so that they never meet those of handshakes.
constexpr std::uint64_t first_question = std::uint64_t{1} << 32;
constexpr std::uint64_t first_relayed = std::uint64_t{1} << 48;
bool is_question(std::uint64_t id) { return id >= first_question && id < first_relayed; }
bool is_relayed(std::uint64_t id) { return id >= first_relayed; }
// Ports give up by themselves; what they asked need not be remembered for longer than any of them would.
constexpr std::size_t most_relayed = 4096;

}  // namespace

EndpointActor::EndpointActor(caf::actor_config& config, Parts parts)
    : caf::event_based_actor(config), parts_(std::move(parts)) {}

caf::behavior EndpointActor::make_behavior() {
  return {[this](const ConnectRequest& request) { connect(request); },
          [this](const ControlArrived& arrived) { on_control(arrived.message); },
          [this](const ControlRefused& refused) { on_refused(refused.why); },
          [this](const RailsChanged& changed) { on_rails(changed); },
          [this](const SubmitSlowly& request) { submit(request); },
          [this](const FindRegion& request) { find_region(request); },
          [this](const RelayRequest& request) { relay(request); },
          [this](const Disconnect& request) { disconnect(request); },
          [this](HeartbeatTick beat) {
            tick();
            if (!beat.once) delayed_send(this, parts_.config->heartbeat_interval, HeartbeatTick{});
          },
          [this](HandshakeExpired expired) {
            if (expired.round != handshake_round_) return;
            const auto route = current_ ? current_->route() : nullptr;
            if (phase_ == Phase::connecting && route && !route->groups.empty()) return become_up();
            const auto limit = parts_.config->connect_timeout.count();
            if (phase_ == Phase::handshake)
              on_refused({Errc::unreachable, fmt::format("no answer from {} within {} ms: is an engine running there?",
                                                         parts_.address, limit)});
            if (phase_ == Phase::connecting)
              on_refused({Errc::unreachable,
                          fmt::format("{} answers, but none of its data ports did within {} ms: does a firewall let "
                                      "only the control port through?",
                                      who(), limit)});
          },
          [this](ParkedExpired expired) {
            const auto found = parked_.find(expired.id);
            if (found == parked_.end()) return;
            if (expired.if_lost && found->second.peer->state.load() != PeerState::lost) return;
            Parked parked = std::move(found->second);
            parked_.erase(found);
            Status why = parked.peer->refusal();
            if (parked.peer->state.load() == PeerState::up || phase_ == Phase::connecting)
              why = {Errc::timed_out, fmt::format("{} did not answer in time", who())};
            refuse(parked, why);
          },
          [this](const StopEndpoint& stop) {
            if (dialled_) ask(0, ByeMessage{parts_.incarnation});
            fail_waiters(stop.why);
            refuse_all_parked(stop.why);
            send(parts_.bootstrap, HangUp{parts_.line});
            quit();
          }};
}

void EndpointActor::on_exit() {
  fail_waiters({Errc::shutting_down, "the engine is being destroyed"});
  refuse_all_parked({Errc::shutting_down, "the engine is being destroyed"});
  relayed_.clear();
  parts_.bootstrap = nullptr;
  parts_.scheduler = nullptr;
  parts_.launch = nullptr;
}

std::string EndpointActor::who() const {
  return current_ ? fmt::format("peer '{}' at {}", current_->name, parts_.address)
                  : fmt::format("the engine at {}", parts_.address);
}

void EndpointActor::ask(std::uint64_t id, ControlBody body) {
  send(parts_.bootstrap, SendControl{parts_.line, encode({id, std::move(body)})});
}

// ---------------------------------------------------------------- connecting

void EndpointActor::connect(const ConnectRequest& request) {
  if (phase_ == Phase::up) {
    request.answer->set_value(current_);
    return;
  }
  waiters_.push_back(request.answer);
  if (phase_ == Phase::handshake || phase_ == Phase::connecting) return;
  lost_since_ = {};
  start_handshake();
}

void EndpointActor::start_handshake() {
  if (!dialled_) {
    send(parts_.bootstrap, Dial{parts_.line, parts_.address, this});
    dialled_ = true;
  }
  phase_ = Phase::handshake;
  ++handshake_round_;
  ask(handshake_round_, HelloMessage{protocol_version, parts_.name, parts_.incarnation, parts_.facts.host_id});
  delayed_send(this, parts_.config->connect_timeout, HandshakeExpired{handshake_round_});
}

void EndpointActor::on_welcome(const WelcomeMessage& welcome) {
  if (phase_ != Phase::handshake) return;
  if (welcome.protocol != protocol_version)
    return on_refused(
        {Errc::version_mismatch, fmt::format("engine '{}' at {} speaks protocol version {}, this engine speaks {}",
                                             welcome.name, parts_.address, welcome.protocol, protocol_version)});
  last_seen_ = clock().now();
  if (current_ && current_->incarnation != welcome.incarnation) declare_stale(Phase::handshake);
  current_ = parts_.peers->find_or_add(welcome.name, welcome.incarnation);
  current_->set_address(parts_.address);
  for (const RemoteRegion& region : welcome.regions) current_->set_region(region);
  std::string reasons;
  auto rails = plan_rails(welcome, reasons);
  if (rails.empty())
    return on_refused({Errc::no_path, fmt::format("no transport joins this engine and {} ({})", who(), reasons)});
  phase_ = Phase::connecting;
  current_->set_state(PeerState::connecting);
  send(parts_.scheduler, AddPeer{current_, std::move(rails), this});
  if (!ticking_) {
    ticking_ = true;
    delayed_send(this, parts_.config->heartbeat_interval, HeartbeatTick{});
  }
}

std::vector<RailPlan> EndpointActor::plan_rails(const WelcomeMessage& welcome, std::string& reasons) const {
  std::vector<RailPlan> plans;
  const HostFacts peer{welcome.host_id};
  std::uint32_t tier = 0;
  for (const auto& transport : parts_.transports) {
    std::vector<std::string> addresses;
    for (const PortAdvert& port : welcome.ports)
      if (port.transport == transport->name()) addresses.push_back(port.address);
    const Status reaches = addresses.empty() ? Status(Errc::no_path, "the peer does not offer it")
                                             : transport->reaches(parts_.facts, peer);
    if (!reaches.is_ok()) {
      reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", transport->name(), reaches.text());
      continue;
    }
    // At least one rail for each card, or the other cards would lie idle.
    const int rails = std::max(parts_.config->rails, static_cast<int>(transport->paths()));
    for (int i = 0; i < rails; ++i) {
      RailPlan plan;
      plan.group = static_cast<std::uint32_t>(i % parts_.config->pollers);
      plan.spec.tier = tier;
      plan.spec.transport = transport->name();
      plan.spec.one_sided = transport->one_sided();
      ChannelSpec& channel = plan.spec.channel;
      channel.address = addresses[static_cast<std::size_t>(i) % addresses.size()];
      channel.host = welcome.data_host.empty() ? parts_.host : welcome.data_host;
      channel.token = welcome.token;
      channel.target_incarnation = welcome.incarnation;
      channel.path = static_cast<std::uint32_t>(i);
      plans.push_back(std::move(plan));
    }
    ++tier;
  }
  if (!plans.empty())
    log(LogLevel::info, fmt::format("{}: using {}{}", who(), plans.front().spec.transport,
                                    reasons.empty() ? "" : fmt::format(" (not {})", reasons)));
  return plans;
}

void EndpointActor::on_refused(const Status& why) {
  if (phase_ != Phase::handshake && phase_ != Phase::connecting) return;
  // Nobody waits: an attempt of ours to find a lost peer again, which may be the hundredth.
  log(waiters_.empty() ? LogLevel::debug : LogLevel::warning,
      fmt::format("connecting to {} failed: {}", parts_.address, why.to_string()));
  const PeerState state = current_ ? current_->state.load() : PeerState::inbound;
  phase_ = state == PeerState::lost ? Phase::lost : Phase::idle;
  if (state == PeerState::connecting || state == PeerState::up || state == PeerState::suspect)
    leave(PeerState::lost, Phase::lost, why);
  fail_waiters(why);
  refuse_all_parked(why);
}

void EndpointActor::fail_waiters(const Status& why) {
  for (const auto& waiter : std::exchange(waiters_, {})) waiter->set_value(why);
}

void EndpointActor::answer_waiters() {
  for (const auto& waiter : std::exchange(waiters_, {})) waiter->set_value(current_);
}

// ---------------------------------------------------------------- rails and life

void EndpointActor::on_rails(const RailsChanged& changed) {
  if (!current_ || changed.peer != current_->slot) return;
  if (changed.up) {
    if (phase_ != Phase::connecting && phase_ != Phase::suspect && phase_ != Phase::up) return;
    // While connecting, wait until the better rails have had their chance too.
    if (phase_ == Phase::connecting && !changed.settled) return;
    return become_up();
  }
  if (phase_ == Phase::connecting && changed.settled) return on_refused(changed.why);
  if (phase_ != Phase::up) return;
  phase_ = Phase::suspect;
  suspect_since_ = clock().now();
  current_->set_state(PeerState::suspect, {Errc::peer_lost, std::string(changed.why.text())});
  ask(0, PingMessage{parts_.incarnation});
  delayed_send(this, suspect_limit, HeartbeatTick{true});
}

void EndpointActor::become_up() {
  phase_ = Phase::up;
  lost_since_ = {};
  current_->set_state(PeerState::up);
  answer_waiters();
  review_parked();
}

void EndpointActor::on_pong(const PongMessage& pong) {
  if (!current_ || phase_ == Phase::handshake || phase_ == Phase::idle || phase_ == Phase::closed) return;
  last_seen_ = clock().now();
  if (pong.incarnation != current_->incarnation) {
    declare_stale(Phase::idle);
    if (!waiters_.empty()) start_handshake();
    return;
  }
  // It forgot us (we were silent for long), or it is back: shake hands again, in the same life.
  if (phase_ == Phase::lost || (!pong.known && (phase_ == Phase::up || phase_ == Phase::suspect))) start_handshake();
}

void EndpointActor::tick() {
  const TimePoint now = clock().now();
  if (phase_ == Phase::suspect && now - suspect_since_ >= suspect_limit && last_seen_ <= suspect_since_)
    declare(PeerState::lost, Phase::lost,
            {Errc::peer_lost, fmt::format("{}: {}, and it does not answer", who(), current_->reason().text())});
  if ((phase_ == Phase::up || phase_ == Phase::suspect) && now - last_seen_ > parts_.config->peer_timeout)
    declare(PeerState::lost, Phase::lost,
            {Errc::peer_lost,
             fmt::format("{} has not answered for {} ms", who(),
                         std::chrono::duration_cast<std::chrono::milliseconds>(now - last_seen_).count())});
  drop_cancelled();
  repeat_questions();
  const bool interested = phase_ == Phase::up || phase_ == Phase::suspect || phase_ == Phase::connecting ||
                          phase_ == Phase::handshake || (phase_ == Phase::lost && now - lost_since_ < lost_interest);
  if (interested && phase_ != Phase::handshake) ask(0, PingMessage{parts_.incarnation});
}

void EndpointActor::declare(PeerState state, Phase phase, const Status& why) {
  log(LogLevel::warning, why.to_string());
  leave(state, phase, why);
}

void EndpointActor::declare_stale(Phase phase) {
  const Status why(Errc::stale_peer, fmt::format("peer '{}' at {} has restarted: connect again for a new handle",
                                                 current_->name, parts_.address));
  declare(PeerState::stale, phase, why);
  refuse_all_parked(why);
}

void EndpointActor::leave(PeerState state, Phase phase, const Status& why) {
  current_->set_state(state, why);
  phase_ = phase;
  // Failed attempts to find it again do not renew our interest, or that would never end.
  if (lost_since_ == TimePoint{}) lost_since_ = clock().now();
  send(parts_.scheduler, RemovePeer{current_->slot, why});
  // Answers may have been lost with the connection: what waits is asked for again if the peer is back
  // soon, as long as a transfer handed over only now would wait.
  questions_.clear();
  for (auto& [id, parked] : parked_) {
    parked.question = 0;
    if (state == PeerState::lost) delayed_send(this, suspect_limit, ParkedExpired{id, true});
  }
}

void EndpointActor::disconnect(const Disconnect& request) {
  if (!current_ || request.peer != current_) return;
  const Status why(Errc::cancelled, fmt::format("{} was disconnected by this engine", who()));
  leave(PeerState::closed, Phase::closed, why);
  ask(0, ByeMessage{parts_.incarnation});
  fail_waiters(why);
  refuse_all_parked(why);
  parts_.peers->remove(current_->slot);
}

// ---------------------------------------------------------------- slow work

void EndpointActor::submit(const SubmitSlowly& request) {
  Parked parked{request.peer, request.transfer, nullptr, request.region, 0};
  if (request.peer != current_ || phase_ == Phase::closed || phase_ == Phase::idle)
    return refuse(parked, request.peer->refusal());
  const bool knows_region = request.region.empty();
  if (knows_region && (phase_ == Phase::up || phase_ == Phase::suspect || phase_ == Phase::connecting))
    return parts_.launch(request.transfer, *request.peer);
  if (phase_ == Phase::up || phase_ == Phase::suspect) {
    park(std::move(parked), request.transfer->deadline() - clock().now());
    return ask_unless_asked(request.region);
  }
  // Lost, or shaking hands: its next sign of life decides, within the limit.
  if (phase_ == Phase::lost) ask(0, PingMessage{parts_.incarnation});
  park(std::move(parked), std::min<Duration>(request.transfer->deadline() - clock().now(), suspect_limit));
}

void EndpointActor::find_region(const FindRegion& request) {
  Parked parked{request.peer, {}, request.answer, request.name, 0};
  if (request.peer != current_ || phase_ == Phase::idle || phase_ == Phase::lost || phase_ == Phase::closed)
    return refuse(parked, request.peer->refusal());
  park(std::move(parked), parts_.config->connect_timeout);
  if (phase_ == Phase::up || phase_ == Phase::suspect) ask_unless_asked(request.name);
}

void EndpointActor::park(Parked parked, Duration limit) {
  const std::uint64_t id = next_parked_++;
  parked_.emplace(id, std::move(parked));
  delayed_send(this, std::clamp<Duration>(limit, Duration::zero(), longest_wait), ParkedExpired{id});
}

void EndpointActor::ask_for_region(const std::string& region) {
  const std::uint64_t id = first_question + next_question_++;
  questions_[region] = {id, clock().now()};
  for (auto& [number, parked] : parked_)
    if (parked.region == region) parked.question = id;
  ask(id, FindRegionMessage{parts_.incarnation, region});
}

// One question serves everybody: thousands of transfers to a new region would otherwise be thousands of
// questions, more than the socket queues.
void EndpointActor::ask_unless_asked(const std::string& region) {
  if (!questions_.contains(region)) ask_for_region(region);
}

// ZeroMQ drops what it can not queue, and a connection may break with an answer on it.
void EndpointActor::repeat_questions() {
  if (phase_ != Phase::up && phase_ != Phase::suspect) return;
  std::vector<std::string> overdue;
  for (const auto& [region, question] : questions_)
    if (clock().now() - question.asked_at >= parts_.config->heartbeat_interval) overdue.push_back(region);
  for (const std::string& region : overdue) {
    const bool awaited =
        std::any_of(parked_.begin(), parked_.end(), [&](const auto& entry) { return entry.second.region == region; });
    if (awaited)
      ask_for_region(region);
    else
      questions_.erase(region);
  }
}

EndpointActor::Questions::iterator EndpointActor::find_question(std::uint64_t id) {
  return std::find_if(questions_.begin(), questions_.end(), [id](const auto& entry) { return entry.second.id == id; });
}

void EndpointActor::on_region(std::uint64_t question, const RegionMessage& message) {
  const auto open = find_question(question);
  if (open == questions_.end()) return;
  last_seen_ = clock().now();
  const std::string region = open->first;
  if (!message.found || message.region.name != region)
    return on_region_refused(question, {Errc::unknown_region, fmt::format("{} has no region '{}'", who(), region)});
  questions_.erase(open);
  RemoteRegion described = message.region;
  if (Status status = take_lease(described); !status) {
    for (Parked& parked : take_parked([&](const Parked& one) { return one.region == region; }))
      refuse(parked, status.with_context(fmt::format("region '{}' of {}", region, who())));
    return;
  }
  // Leases come and go: remembering each would take memory without end.
  std::shared_ptr<const RemoteRegion> remote;
  if (described.lease) {
    remote = std::make_shared<const RemoteRegion>(std::move(described));
  } else {
    current_->set_region(std::move(described));
    remote = current_->find_region(region);
  }
  for (Parked& parked : take_parked([&](const Parked& one) { return one.region == region; })) resolve(parked, remote);
}

void EndpointActor::on_region_refused(std::uint64_t question, const Status& why) {
  const auto open = find_question(question);
  if (open == questions_.end()) return;
  const std::string region = open->first;
  questions_.erase(open);
  for (Parked& parked : take_parked([&](const Parked& one) { return one.question == question; })) refuse(parked, why);
  // Those that came after the question was asked are not answered by it: the region may be newer.
  if (std::any_of(parked_.begin(), parked_.end(), [&](const auto& entry) { return entry.second.region == region; }))
    ask_for_region(region);
}

std::vector<EndpointActor::Parked> EndpointActor::take_parked(const std::function<bool(const Parked&)>& which) {
  std::vector<Parked> taken;
  for (auto place = parked_.begin(); place != parked_.end();) {
    if (which(place->second)) {
      taken.push_back(std::move(place->second));
      place = parked_.erase(place);
    } else {
      ++place;
    }
  }
  return taken;
}

void EndpointActor::resolve(Parked& parked, const std::shared_ptr<const RemoteRegion>& region) {
  if (parked.answer) return parked.answer->set_value(region);
  parked.transfer->set_remote(region);
  parts_.launch(parked.transfer, *parked.peer);
}

void EndpointActor::refuse(Parked& parked, const Status& why) {
  if (parked.answer) return parked.answer->set_value(why);
  parked.transfer->complete(why);
}

void EndpointActor::relay(const RelayRequest& request) {
  const std::uint64_t id = first_relayed + next_relayed_++;
  if (relayed_.size() >= most_relayed) relayed_.erase(relayed_.begin());
  relayed_.emplace(id, Relayed{request.poller, request.request.transport, request.request.channel});
  ask(id,
      ChannelMessage{parts_.incarnation, request.request.transport, request.request.address, request.request.bytes});
}

void EndpointActor::on_port_answer(std::uint64_t id, const Result<std::string>& answer) {
  const auto found = relayed_.find(id);
  if (found == relayed_.end()) return;
  last_seen_ = clock().now();
  send(found->second.poller, AnswerPort{found->second.transport, found->second.channel, answer});
  relayed_.erase(found);
}

void EndpointActor::review_parked() {
  for (auto place = parked_.begin(); place != parked_.end();) {
    Parked& parked = place->second;
    if (phase_ == Phase::up && parked.peer == current_) {
      if (parked.region.empty()) {
        parts_.launch(parked.transfer, *parked.peer);
        place = parked_.erase(place);
        continue;
      }
      if (parked.question == 0) ask_unless_asked(parked.region);
    }
    ++place;
  }
}

void EndpointActor::drop_cancelled() {
  for (auto place = parked_.begin(); place != parked_.end();) {
    Parked& parked = place->second;
    if (!parked.transfer || !parked.transfer->cancel_requested()) {
      ++place;
      continue;
    }
    const RefPtr<TransferState> transfer = parked.transfer;
    place = parked_.erase(place);
    transfer->complete({Errc::cancelled, fmt::format("{} with {} was cancelled by its caller before it began",
                                                     to_string(transfer->op()), who())});
  }
}

void EndpointActor::refuse_all_parked(const Status& why) {
  questions_.clear();
  for (auto& [id, parked] : std::exchange(parked_, {})) refuse(parked, why);
}

// ---------------------------------------------------------------- control messages

void EndpointActor::on_control(const ControlMessage& message) {
  if (const auto* welcome = std::get_if<WelcomeMessage>(&message.body)) {
    if (message.id == handshake_round_) on_welcome(*welcome);
  } else if (const auto* refused = std::get_if<RefusedMessage>(&message.body)) {
    const auto code = refused->code > 0 && refused->code <= static_cast<std::uint32_t>(Errc::internal)
                          ? static_cast<Errc>(refused->code)
                          : Errc::internal;
    const Status why = Status(code, refused->text).with_context(fmt::format("refused by {}", parts_.address));
    if (is_relayed(message.id))
      on_port_answer(message.id, why);
    else if (is_question(message.id))
      on_region_refused(message.id, why);
    else if (message.id == handshake_round_ || message.id == 0)  // 0: it could not even read our number
      on_refused(why);
  } else if (const auto* pong = std::get_if<PongMessage>(&message.body)) {
    on_pong(*pong);
  } else if (const auto* region = std::get_if<RegionMessage>(&message.body)) {
    if (is_question(message.id)) on_region(message.id, *region);
  } else if (const auto* answer = std::get_if<ChannelAnswerMessage>(&message.body)) {
    on_port_answer(message.id, answer->answer);
  }
}

}  // namespace kvferry
