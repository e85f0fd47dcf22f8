#include <future>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <kvferry/actors/endpoint.hpp>

#include "tests/actors/stage.hpp"

namespace kvferry {
namespace {

using namespace std::chrono_literals;

using BootstrapProbe = test::Probe<Dial, SendControl, HangUp>;
using SchedulerProbe = test::Probe<AddPeer, RemovePeer>;
using ConnectAnswer = std::future<Result<PeerPtr>>;
using RegionAnswer = std::future<Result<std::shared_ptr<const RemoteRegion>>>;

constexpr std::uint64_t own_life = 1000;
const char* const address = "tcp://10.0.0.2:7000";

/// Only what an endpoint asks of a transport.
class NamedTransport final : public Transport {
 public:
  explicit NamedTransport(std::string name, Status reaches = {})
      : name_(std::move(name)), reaches_(std::move(reaches)) {}
  std::string_view name() const override { return name_; }
  Status reaches(const HostFacts&, const HostFacts& peer) const override {
    return reaches_.is_ok() ? reaches_ : reaches_.with_context("to " + peer.host_id);
  }
  Result<std::string> register_region(const RegionRecord&) override { return std::string(); }
  void unregister_region(const RegionRecord&) override {}
  Result<std::unique_ptr<Port>> open_port(const PortContext&, PortEvents&) override {
    return {Errc::unsupported, "no ports in these tests"};
  }

 private:
  std::string name_;
  Status reaches_;
};

template <class T>
bool ready(const std::future<T>& future) {
  return future.wait_for(0s) == std::future_status::ready;
}

void expect_error(ConnectAnswer& answer, Errc code, std::string_view part = {}) {
  ASSERT_TRUE(ready(answer)) << "nobody answered";
  const Status status = answer.get().status();
  EXPECT_TRUE(status == code) << status.to_string();
  EXPECT_NE(status.text().find(part), std::string_view::npos) << status.text() << "\nshould say: " << part;
}

class EndpointTest : public testing::Test {
 protected:
  EndpointTest() {
    transports = {std::make_shared<NamedTransport>("fast"), std::make_shared<NamedTransport>("slow")};
    bootstrap = stage.spawn<BootstrapProbe>(control);
    scheduler = stage.spawn<SchedulerProbe>(plans);
  }

  /// On the first use, so that a test may change config and transports before.
  const caf::actor& endpoint() {
    if (endpoint_) return endpoint_;
    EndpointActor::Parts parts;
    parts.line = 3;
    parts.address = address;
    parts.host = "10.0.0.2";
    parts.name = "initiator";
    parts.incarnation = own_life;
    parts.facts.host_id = "our-host";
    parts.config = &config;
    parts.peers = &peers;
    parts.transports = transports;
    parts.bootstrap = bootstrap;
    parts.scheduler = scheduler;
    parts.launch = [this](RefPtr<TransferState> transfer, PeerRecord& peer) {
      EXPECT_EQ(transfer->peer_slot, peer.slot);
      launched.push_back(std::move(transfer));
    };
    endpoint_ = stage.spawn<EndpointActor>(std::move(parts));
    return endpoint_;
  }

  // ---- what the endpoint sent
  template <class Body>
  std::vector<std::pair<std::uint64_t, Body>> said() const {
    std::vector<std::pair<std::uint64_t, Body>> found;
    for (const auto& sent : control->of<SendControl>()) {
      EXPECT_EQ(sent.line, 3u);
      const auto message = decode(std::as_bytes(std::span(sent.bytes)));
      EXPECT_TRUE(message) << message.status().to_string();
      if (const auto* body = std::get_if<Body>(&message->body)) found.emplace_back(message->id, *body);
    }
    return found;
  }
  std::size_t pings() const { return said<PingMessage>().size(); }
  /// Number of the latest handshake.
  std::uint64_t round() {
    if (const auto hellos = said<HelloMessage>(); !hellos.empty()) round_ = hellos.back().first;
    return round_;
  }
  std::uint64_t question() const { return said<FindRegionMessage>().back().first; }
  AddPeer last_plan() const { return plans->of<AddPeer>().back(); }

  // ---- what happens to it
  ConnectAnswer connect() {
    auto promise = std::make_shared<std::promise<Result<PeerPtr>>>();
    auto answer = promise->get_future();
    stage.send(endpoint(), ConnectRequest{std::move(promise)});
    return answer;
  }
  void hear(std::uint64_t id, ControlBody body) { stage.send(endpoint(), ControlArrived{{id, std::move(body)}}); }
  void pong(std::uint64_t life = 5, bool known = true) { hear(0, PongMessage{life, known}); }
  WelcomeMessage welcome(std::uint64_t life = 5) const {
    WelcomeMessage made;
    made.name = "target";
    made.incarnation = life;
    made.host_id = "their-host";
    made.token[0] = static_cast<std::byte>(life);
    made.ports = {{"slow", "slow-0"}, {"fast", "fast-0"}};
    made.regions = {remote("kv")};
    return made;
  }
  static RemoteRegion remote(std::string name) {
    return {{7, 1}, std::move(name), 4096, MemoryKind::host, Access::read_write, {}, {}};
  }
  void rails(const PeerPtr& peer, bool up, bool settled = true) {
    stage.send(endpoint(), RailsChanged{peer->slot, up, settled,
                                        up ? Status() : Status(Errc::no_path, "no rail to peer 'target' is up")});
  }
  /// The whole of a connect that succeeds.
  PeerPtr connected(std::uint64_t life = 5) {
    auto answer = connect();
    hear(round(), welcome(life));
    rails(last_plan().peer, true);
    EXPECT_TRUE(ready(answer));
    return answer.get().value();
  }
  void lose(const PeerPtr& peer) {
    rails(peer, false);
    stage.advance(1s);
    EXPECT_EQ(peer->state.load(), PeerState::lost);
  }
  /// The peer answers every ping while time passes.
  void advance_in_touch(Duration time, std::uint64_t life = 5, bool known = true) {
    for (; time > 0ns; time -= 100ms) {
      const std::size_t before = pings();
      stage.advance(100ms);
      if (pings() > before) pong(life, known);
    }
  }

  // ---- slow work
  RefPtr<TransferState> transfer(const PeerPtr& peer, Duration limit = 30s) {
    const Slice slice{0, 0, 64};
    auto made = TransferState::create(
        {.deadline = limit == Duration::max() ? TimePoint::max() : stage.now() + limit, .slices = {&slice, 1}});
    made->peer_slot = peer->slot;
    return made;
  }
  RefPtr<TransferState> submit(const PeerPtr& peer, std::string region = {}, Duration limit = 30s) {
    auto made = transfer(peer, limit);
    stage.send(endpoint(), SubmitSlowly{made, peer, std::move(region)});
    return made;
  }
  RegionAnswer find_region(const PeerPtr& peer, std::string name) {
    auto promise = std::make_shared<std::promise<Result<std::shared_ptr<const RemoteRegion>>>>();
    auto answer = promise->get_future();
    stage.send(endpoint(), FindRegion{peer, std::move(name), std::move(promise)});
    return answer;
  }
  static void expect_ended(const RefPtr<TransferState>& transfer, Errc code, std::string_view part = {}) {
    ASSERT_TRUE(transfer->done()) << "nobody ended it";
    EXPECT_TRUE(transfer->status() == code) << transfer->status().to_string();
    EXPECT_NE(transfer->status().text().find(part), std::string_view::npos) << transfer->status().text();
  }

  test::Stage stage;
  EngineConfig config;
  PeerTable peers{own_life};
  std::vector<std::shared_ptr<Transport>> transports;
  std::shared_ptr<BootstrapProbe::Log> control = std::make_shared<BootstrapProbe::Log>();
  std::shared_ptr<SchedulerProbe::Log> plans = std::make_shared<SchedulerProbe::Log>();
  std::vector<RefPtr<TransferState>> launched;
  caf::actor bootstrap;
  caf::actor scheduler;

 private:
  caf::actor endpoint_;
  std::uint64_t round_ = 0;
};

// ---------------------------------------------------------------- connecting

TEST_F(EndpointTest, ConnectDialsAndSaysHello) {
  const auto answer = connect();
  ASSERT_EQ(control->all().size(), 2u);
  ASSERT_TRUE(std::holds_alternative<Dial>(control->all()[0])) << "the line exists before anything is said on it";
  const auto dial = control->of<Dial>()[0];
  EXPECT_EQ(dial.line, 3u);
  EXPECT_EQ(dial.address, address);
  const auto hello = said<HelloMessage>().at(0).second;
  EXPECT_EQ(hello.protocol, protocol_version);
  EXPECT_EQ(hello.name, "initiator");
  EXPECT_EQ(hello.incarnation, own_life);
  EXPECT_EQ(hello.host_id, "our-host");
  EXPECT_FALSE(ready(answer));
}

TEST_F(EndpointTest, AWelcomeBecomesRails) {
  config.rails = 3;
  config.pollers = 2;
  transports = {std::make_shared<NamedTransport>("near", Status(Errc::no_path, "another host")),
                std::make_shared<NamedTransport>("fast"), std::make_shared<NamedTransport>("absent"),
                std::make_shared<NamedTransport>("slow")};
  const auto answer = connect();
  auto offer = welcome();
  offer.ports = {{"slow", "slow-0"}, {"fast", "fast-0"}, {"near", "near-0"}, {"fast", "fast-1"}, {"odd", "odd-0"}};
  hear(round(), offer);
  const auto add = last_plan();
  EXPECT_EQ(add.peer, peers.find_life(5));
  EXPECT_EQ(add.peer->name, "target");
  EXPECT_EQ(add.peer->address(), address);
  EXPECT_EQ(add.peer->state.load(), PeerState::connecting);
  ASSERT_NE(add.peer->find_region("kv"), nullptr) << "what is registered already needs no question later";
  ASSERT_EQ(add.rails.size(), 6u);
  const char* const expected[] = {"fast-0", "fast-1", "fast-0", "slow-0", "slow-0", "slow-0"};
  for (std::size_t i = 0; i < 6; ++i) {
    SCOPED_TRACE(i);
    const RailPlan& rail = add.rails[i];
    EXPECT_EQ(rail.spec.transport, i < 3 ? "fast" : "slow") << "in our order, not in the peer's";
    EXPECT_EQ(rail.spec.tier, i < 3 ? 0u : 1u);
    EXPECT_EQ(rail.group, i % 3 % 2);
    EXPECT_EQ(rail.spec.channel.address, expected[i]);
    EXPECT_EQ(rail.spec.channel.host, "10.0.0.2") << "without a data host the one that was dialled";
    EXPECT_EQ(rail.spec.channel.token, offer.token);
    EXPECT_EQ(rail.spec.channel.target_incarnation, 5u);
  }
  EXPECT_FALSE(ready(answer)) << "no rail is up yet";
}

TEST_F(EndpointTest, TheDataHostOfTheWelcomeIsUsed) {
  const auto answer = connect();
  auto offer = welcome();
  offer.data_host = "192.168.9.9";
  hear(round(), offer);
  EXPECT_EQ(last_plan().rails.at(0).spec.channel.host, "192.168.9.9");
}

TEST_F(EndpointTest, OneHandshakeAnswersEveryConnect) {
  auto first = connect();
  auto second = connect();
  hear(round(), welcome());
  auto third = connect();
  const auto peer = last_plan().peer;
  rails(peer, false, false);
  rails(peer, true, false);
  EXPECT_FALSE(ready(first)) << "a better rail may still come up";
  rails(peer, true);
  for (auto* answer : {&first, &second, &third}) {
    ASSERT_TRUE(ready(*answer));
    EXPECT_EQ(answer->get().value(), peer);
  }
  EXPECT_EQ(peer->state.load(), PeerState::up);
  auto late = connect();
  ASSERT_TRUE(ready(late)) << "who is up needs no handshake";
  EXPECT_EQ(late.get().value(), peer);
  EXPECT_EQ(said<HelloMessage>().size(), 1u);
  EXPECT_EQ(control->of<Dial>().size(), 1u);
}

TEST_F(EndpointTest, ARefusalAnswersEveryConnect) {
  auto first = connect();
  auto second = connect();
  hear(round(), RefusedMessage{2, static_cast<std::uint32_t>(Errc::version_mismatch), "use the same release"});
  expect_error(first, Errc::version_mismatch, "refused by tcp://10.0.0.2:7000: use the same release");
  expect_error(second, Errc::version_mismatch);
  EXPECT_TRUE(plans->all().empty());
  auto again = connect();
  EXPECT_EQ(said<HelloMessage>().size(), 2u) << "the next connect tries again";
  EXPECT_EQ(control->of<Dial>().size(), 1u) << "on the line that is there";
  hear(round(), welcome());
  rails(last_plan().peer, true);
  EXPECT_TRUE(ready(again));
}

TEST_F(EndpointTest, AnUnknownRefusalCodeIsStillAnError) {
  for (const std::uint32_t code : {0u, 22u, 0xffffffffu}) {
    auto answer = connect();
    hear(round(), RefusedMessage{1, code, "a newer peer's reason"});
    expect_error(answer, Errc::internal, "a newer peer's reason");
  }
}

TEST_F(EndpointTest, OnlyTheRefusalOfThisRoundCounts) {
  auto first = connect();
  const auto old_round = round();
  stage.advance(5s);
  expect_error(first, Errc::unreachable);
  auto second = connect();
  hear(old_round, RefusedMessage{1, 8, "late"});
  EXPECT_FALSE(ready(second));
  hear(old_round, welcome());
  EXPECT_TRUE(plans->all().empty());
  hear(0, RefusedMessage{1, static_cast<std::uint32_t>(Errc::version_mismatch), "schema version 2"});
  expect_error(second, Errc::version_mismatch, "schema version 2");
}

TEST_F(EndpointTest, AnUnreadableAnswerIsARefusal) {
  auto answer = connect();
  stage.send(endpoint(), ControlRefused{{Errc::malformed, "malformed control message of 3 bytes"}});
  expect_error(answer, Errc::malformed, "of 3 bytes");
}

TEST_F(EndpointTest, SilenceEndsAConnectInTime) {
  auto first = connect();
  stage.advance(2s);
  auto second = connect();
  stage.advance(2990ms);
  EXPECT_FALSE(ready(first));
  stage.advance(10ms);
  expect_error(first, Errc::unreachable, "no answer from tcp://10.0.0.2:7000 within 5000 ms");
  expect_error(second, Errc::unreachable);
  hear(round(), welcome());
  EXPECT_TRUE(plans->all().empty()) << "too late";
}

TEST_F(EndpointTest, SilentDataPortsAreNamedAsSuch) {
  auto answer = connect();
  hear(round(), welcome());
  stage.advance(5s);
  expect_error(answer, Errc::unreachable, "none of its data ports did within 5000 ms");
  EXPECT_EQ(plans->of<RemovePeer>().size(), 1u);
  EXPECT_EQ(last_plan().peer->state.load(), PeerState::lost);
}

TEST_F(EndpointTest, ARailThatIsUpDecidesWhenTheOthersAreLate) {
  auto answer = connect();
  hear(round(), welcome());
  const auto peer = last_plan().peer;
  peer->set_route(std::make_shared<Route>(Route{{0}, "slow"}));
  rails(peer, true, false);
  advance_in_touch(4900ms);
  EXPECT_FALSE(ready(answer));
  advance_in_touch(100ms);
  ASSERT_TRUE(ready(answer));
  EXPECT_EQ(answer.get().value(), peer);
  EXPECT_EQ(peer->state.load(), PeerState::up);
}

TEST_F(EndpointTest, RailsThatAllFailEndTheConnect) {
  auto answer = connect();
  hear(round(), welcome());
  const auto peer = last_plan().peer;
  rails(peer, false, false);
  EXPECT_FALSE(ready(answer));
  rails(peer, false);
  expect_error(answer, Errc::no_path, "no rail to peer 'target' is up");
  EXPECT_EQ(peer->state.load(), PeerState::lost);
  ASSERT_EQ(plans->of<RemovePeer>().size(), 1u);
  EXPECT_EQ(plans->of<RemovePeer>()[0].peer, peer->slot);
}

TEST_F(EndpointTest, AnotherProtocolIsRefusedNamingBoth) {
  auto answer = connect();
  auto other = welcome();
  other.protocol = 9;
  hear(round(), other);
  expect_error(answer, Errc::version_mismatch, "speaks protocol version 9, this engine speaks 1");
}

TEST_F(EndpointTest, SaysWhyNoTransportJoinsThem) {
  transports = {std::make_shared<NamedTransport>("near", Status(Errc::no_path, "another host")),
                std::make_shared<NamedTransport>("absent")};
  auto answer = connect();
  auto offer = welcome();
  offer.ports = {{"near", "n"}, {"slow", "s"}};
  hear(round(), offer);
  expect_error(answer, Errc::no_path, "(near: to their-host: another host; absent: the peer does not offer it)");
}

// ---------------------------------------------------------------- heartbeats and loss

TEST_F(EndpointTest, PingsAtTheHeartbeatInterval) {
  const auto peer = connected();
  advance_in_touch(10s);
  EXPECT_EQ(pings(), 20u);
  EXPECT_EQ(said<PingMessage>()[0].second.incarnation, own_life);
  EXPECT_EQ(peer->state.load(), PeerState::up);
  EXPECT_EQ(said<HelloMessage>().size(), 1u);
}

TEST_F(EndpointTest, SilenceLosesThePeer) {
  const auto peer = connected();
  advance_in_touch(2s);
  stage.advance(3s);
  EXPECT_EQ(peer->state.load(), PeerState::up);
  stage.advance(500ms);
  EXPECT_EQ(peer->state.load(), PeerState::lost);
  EXPECT_TRUE(peer->refusal() == Errc::peer_lost);
  EXPECT_NE(peer->refusal().text().find("peer 'target' at tcp://10.0.0.2:7000 has not answered for 3500 ms"),
            std::string_view::npos)
      << peer->refusal().text();
  ASSERT_EQ(plans->of<RemovePeer>().size(), 1u);
  EXPECT_EQ(plans->of<RemovePeer>()[0].peer, peer->slot);
  EXPECT_TRUE(plans->of<RemovePeer>()[0].why == Errc::peer_lost);
}

TEST_F(EndpointTest, AllRailsDownAsksAndLosesWithinASecond) {
  const auto peer = connected();
  const std::size_t before = pings();
  rails(peer, false);
  EXPECT_EQ(peer->state.load(), PeerState::suspect);
  EXPECT_TRUE(peer->refusal() == Errc::peer_lost);
  EXPECT_EQ(pings(), before + 1) << "asked at once";
  stage.advance(990ms);
  EXPECT_EQ(peer->state.load(), PeerState::suspect);
  stage.advance(10ms);
  EXPECT_EQ(peer->state.load(), PeerState::lost);
  EXPECT_NE(peer->refusal().text().find("no rail to peer 'target' is up, and it does not answer"),
            std::string_view::npos)
      << peer->refusal().text();
}

TEST_F(EndpointTest, APeerThatAnswersKeepsItsChance) {
  const auto peer = connected();
  rails(peer, false);
  advance_in_touch(20s);
  EXPECT_EQ(peer->state.load(), PeerState::suspect);
  EXPECT_TRUE(plans->of<RemovePeer>().empty());
  rails(peer, true);
  EXPECT_EQ(peer->state.load(), PeerState::up);
  EXPECT_TRUE(peer->reason().is_ok());
}

TEST_F(EndpointTest, ASuspectThatAnsweredOnceCanStillBeLost) {
  const auto peer = connected();
  rails(peer, false);
  stage.advance(10ms);
  pong();
  stage.advance(2990ms);
  EXPECT_EQ(peer->state.load(), PeerState::suspect);
  stage.advance(510ms);
  EXPECT_EQ(peer->state.load(), PeerState::lost);
}

TEST_F(EndpointTest, ConnectingToASuspectShakesHandsAgain) {
  const auto peer = connected();
  rails(peer, false);
  auto dead = connect();
  EXPECT_EQ(said<HelloMessage>().size(), 2u);
  stage.advance(5s);
  expect_error(dead, Errc::unreachable);
  EXPECT_EQ(peer->state.load(), PeerState::lost);

  auto alive = connect();
  hear(round(), welcome());
  rails(peer, true);
  ASSERT_TRUE(ready(alive));
  EXPECT_EQ(alive.get().value(), peer);
}

TEST_F(EndpointTest, ALostPeerThatAnswersIsFoundAgain) {
  const auto peer = connected();
  lose(peer);
  const std::size_t before = pings();
  stage.advance(1s);
  EXPECT_EQ(pings(), before + 2) << "it is still asked";
  pong();
  EXPECT_EQ(said<HelloMessage>().size(), 2u);
  hear(round(), welcome());
  EXPECT_EQ(last_plan().peer, peer) << "the same life, the same handle";
  EXPECT_EQ(peer->state.load(), PeerState::connecting);
  rails(peer, true);
  EXPECT_EQ(peer->state.load(), PeerState::up);
}

TEST_F(EndpointTest, InterestInALostPeerEnds) {
  const auto peer = connected();
  lose(peer);
  stage.advance(5min);
  const std::size_t before = pings();
  stage.advance(10s);
  EXPECT_EQ(pings(), before);
}

// Its control port answers, its data ports do not: found again and lost again, but not for ever.
TEST_F(EndpointTest, FailedAttemptsDoNotRenewTheInterest) {
  const auto peer = connected();
  lose(peer);
  for (TimePoint end = stage.now() + 6min; stage.now() < end; stage.advance(500ms)) {
    const std::size_t hellos = said<HelloMessage>().size();
    pong();
    if (said<HelloMessage>().size() == hellos) continue;
    hear(round(), welcome());
    rails(peer, false);
    control->clear();
  }
  control->clear();
  stage.advance(10s);
  EXPECT_EQ(pings(), 0u);
}

TEST_F(EndpointTest, ALostPeerThatIsSilentInItsHandshakeIsAskedFurther) {
  const auto peer = connected();
  lose(peer);
  pong();
  stage.advance(5s);
  EXPECT_EQ(peer->state.load(), PeerState::lost);
  const std::size_t before = pings();
  stage.advance(1s);
  EXPECT_GT(pings(), before);
}

TEST_F(EndpointTest, APeerThatForgotUsIsGreetedAgain) {
  const auto peer = connected();
  pong(5, false);
  EXPECT_EQ(said<HelloMessage>().size(), 2u);
  EXPECT_EQ(peer->state.load(), PeerState::up) << "its rails may still carry";
  hear(round(), welcome());
  rails(peer, true);
  EXPECT_EQ(peer->state.load(), PeerState::up);
  EXPECT_TRUE(plans->of<RemovePeer>().empty());
}

TEST_F(EndpointTest, APeerThatForgotUsAndRefusesIsLost) {
  const auto peer = connected();
  pong(5, false);
  hear(round(), RefusedMessage{1, static_cast<std::uint32_t>(Errc::unreachable), "no data port open"});
  EXPECT_EQ(peer->state.load(), PeerState::lost) << "nobody would notice its loss any more";
  EXPECT_EQ(plans->of<RemovePeer>().size(), 1u);
}

// ---------------------------------------------------------------- other lives

TEST_F(EndpointTest, APongOfAnotherLifeMakesTheHandleStale) {
  const auto former = connected(5);
  pong(6);
  EXPECT_EQ(former->state.load(), PeerState::stale);
  EXPECT_TRUE(former->refusal() == Errc::stale_peer);
  EXPECT_NE(former->refusal().text().find("peer 'target' at tcp://10.0.0.2:7000 has restarted: connect again"),
            std::string_view::npos)
      << former->refusal().text();
  ASSERT_EQ(plans->of<RemovePeer>().size(), 1u);
  expect_ended(submit(former), Errc::stale_peer);
  pong(6);
  EXPECT_EQ(plans->of<RemovePeer>().size(), 1u) << "said once";
  EXPECT_EQ(said<HelloMessage>().size(), 1u) << "a new life is connected to when somebody asks for it";

  const auto next = connected(6);
  EXPECT_NE(next, former);
  EXPECT_EQ(next->incarnation, 6u);
  EXPECT_EQ(former->state.load(), PeerState::stale);
  expect_ended(submit(former), Errc::stale_peer);
}

TEST_F(EndpointTest, AWelcomeOfAnotherLifeMakesTheHandleStale) {
  const auto former = connected(5);
  lose(former);
  const auto parked = submit(former);
  auto answer = connect();
  hear(round(), welcome(6));
  EXPECT_EQ(former->state.load(), PeerState::stale);
  expect_ended(parked, Errc::stale_peer);
  rails(last_plan().peer, true);
  ASSERT_TRUE(ready(answer));
  EXPECT_EQ(answer.get().value()->incarnation, 6u);
}

TEST_F(EndpointTest, ARestartWhileConnectingStartsOver) {
  auto answer = connect();
  hear(round(), welcome(5));
  pong(6);
  EXPECT_FALSE(ready(answer));
  EXPECT_EQ(said<HelloMessage>().size(), 2u);
  EXPECT_EQ(peers.find_life(5)->state.load(), PeerState::stale);
  hear(round(), welcome(6));
  rails(peers.find_life(5), true);
  EXPECT_FALSE(ready(answer)) << "that was the former life's rail";
  rails(peers.find_life(6), true);
  ASSERT_TRUE(ready(answer));
  EXPECT_EQ(answer.get().value()->incarnation, 6u);
}

// ---------------------------------------------------------------- slow submits

TEST_F(EndpointTest, ATransferWhoseRegionIsKnownIsLaunched) {
  const auto peer = connected();
  const auto now = submit(peer);
  EXPECT_EQ(launched, std::vector{now});
  rails(peer, false);
  const auto later = submit(peer);
  EXPECT_EQ(launched.size(), 2u) << "a rail may come back: the poller waits for it";
}

TEST_F(EndpointTest, AsksForAnUnknownRegionThenLaunches) {
  const auto peer = connected();
  const auto waiting = submit(peer, "late");
  EXPECT_TRUE(launched.empty());
  ASSERT_EQ(said<FindRegionMessage>().size(), 1u);
  EXPECT_EQ(said<FindRegionMessage>()[0].second.name, "late");
  EXPECT_EQ(said<FindRegionMessage>()[0].second.incarnation, own_life);
  hear(question(), RegionMessage{true, remote("late")});
  ASSERT_EQ(launched, std::vector{waiting});
  ASSERT_NE(waiting->remote(), nullptr);
  EXPECT_EQ(waiting->remote()->name, "late");
  EXPECT_EQ(peer->find_region("late"), waiting->remote()) << "the next one need not ask";
  hear(question(), RegionMessage{true, remote("late")});
  EXPECT_EQ(launched.size(), 1u) << "an answer counts once";
}

TEST_F(EndpointTest, ALeaseIsAskedForEachTimeAndNotRemembered) {
  const auto peer = connected();
  const auto waiting = submit(peer, "lease-1");
  RemoteRegion lease = remote("lease-1");
  describe_lease(RangeSet({{0, 8}}), lease);
  hear(question(), RegionMessage{true, lease});
  ASSERT_EQ(launched, std::vector{waiting});
  ASSERT_TRUE(waiting->remote()->lease);
  EXPECT_TRUE(waiting->remote()->lease->covers(0, 8));
  EXPECT_EQ(peer->find_region("lease-1"), nullptr);
  const auto next = submit(peer, "lease-1");
  lease.descriptors.emplace_back(lease_descriptor, "odd");
  hear(question(), RegionMessage{true, lease});
  expect_ended(next, Errc::malformed);
}

TEST_F(EndpointTest, OneQuestionServesAllThatWaitForARegion) {
  const auto peer = connected();
  std::vector<RefPtr<TransferState>> waiting;
  for (int i = 0; i < 3000; ++i) waiting.push_back(submit(peer, "late"));
  auto handle = find_region(peer, "late");
  ASSERT_EQ(said<FindRegionMessage>().size(), 1u);
  hear(question(), RegionMessage{true, remote("late")});
  EXPECT_EQ(launched, waiting);
  EXPECT_TRUE(ready(handle));
}

TEST_F(EndpointTest, AMissingRegionIsAskedForAgainForThoseWhoCameAfterTheQuestion) {
  const auto peer = connected();
  const auto early = submit(peer, "late");
  const auto asked_early = question();
  const auto after = submit(peer, "late");
  hear(asked_early, RegionMessage{});
  expect_ended(early, Errc::unknown_region);
  EXPECT_FALSE(after->done()) << "it may have been registered since the question was asked";
  ASSERT_EQ(said<FindRegionMessage>().size(), 2u);
  hear(asked_early, RegionMessage{});
  EXPECT_FALSE(after->done()) << "an answer counts once";
  hear(question(), RegionMessage{});
  expect_ended(after, Errc::unknown_region);
}

TEST_F(EndpointTest, AQuestionThatGetsLostIsRepeated) {
  const auto peer = connected();
  const auto waiting = submit(peer, "late");
  auto handle = find_region(peer, "other");
  const std::size_t before = said<FindRegionMessage>().size();
  advance_in_touch(1s);
  EXPECT_GE(said<FindRegionMessage>().size(), before + 2) << "each of the two again";
  for (const auto& [id, find] : said<FindRegionMessage>()) hear(id, RegionMessage{true, remote(find.name)});
  EXPECT_EQ(launched, std::vector{waiting});
  EXPECT_TRUE(ready(handle));
  const std::size_t after = said<FindRegionMessage>().size();
  advance_in_touch(2s);
  EXPECT_EQ(said<FindRegionMessage>().size(), after) << "nobody waits any more";
}

TEST_F(EndpointTest, AMissingRegionEndsTheTransfer) {
  const auto peer = connected();
  const auto missing = submit(peer, "nope");
  hear(question(), RegionMessage{});
  expect_ended(missing, Errc::unknown_region, "peer 'target' at tcp://10.0.0.2:7000 has no region 'nope'");
  const auto other = submit(peer, "nope");
  hear(question(), RegionMessage{true, remote("another")});
  expect_ended(other, Errc::unknown_region);
  EXPECT_EQ(peer->find_region("another"), nullptr) << "nobody asked for it";
  const auto refused = submit(peer, "nope");
  hear(question(), RefusedMessage{1, static_cast<std::uint32_t>(Errc::access_denied), "only a connected engine"});
  expect_ended(refused, Errc::access_denied, "only a connected engine");
  EXPECT_EQ(peer->state.load(), PeerState::up) << "that was no refusal of the connection";
  EXPECT_TRUE(launched.empty());
}

TEST_F(EndpointTest, AnAnswerToNobodyIsIgnored) {
  const auto peer = connected();
  lose(peer);
  const auto parked = submit(peer, "late");  // not asked for: the peer is lost
  hear(0, RegionMessage{true, remote("late")});
  EXPECT_TRUE(launched.empty());
  EXPECT_FALSE(parked->done());
}

TEST_F(EndpointTest, ARegionQuestionEndsWithTheTransfersDeadline) {
  const auto peer = connected();
  const auto waiting = submit(peer, "late", 2s);
  advance_in_touch(1900ms);
  EXPECT_FALSE(waiting->done());
  advance_in_touch(100ms);
  expect_ended(waiting, Errc::timed_out, "peer 'target' at tcp://10.0.0.2:7000 did not answer in time");
  hear(question(), RegionMessage{true, remote("late")});
  EXPECT_TRUE(launched.empty());
}

TEST_F(EndpointTest, ATransferWithoutDeadlineWaits) {
  const auto peer = connected();
  const auto waiting = submit(peer, "late", Duration::max());
  advance_in_touch(10s);
  EXPECT_FALSE(waiting->done());
  hear(question(), RegionMessage{true, remote("late")});
  EXPECT_EQ(launched, std::vector{waiting});
}

TEST_F(EndpointTest, AnOverdueTransferEndsAtOnce) {
  const auto peer = connected();
  const auto late = submit(peer, "late", -1s);
  stage.advance(10ms);
  expect_ended(late, Errc::timed_out);
}

TEST_F(EndpointTest, ATransferToALostPeerWaitsForASignOfLife) {
  const auto peer = connected();
  lose(peer);
  const std::size_t before = pings();
  const auto waiting = submit(peer);
  EXPECT_EQ(pings(), before + 1) << "asked at once";
  EXPECT_FALSE(waiting->done());
  pong();
  hear(round(), welcome());
  EXPECT_TRUE(launched.empty());
  rails(peer, true);
  EXPECT_EQ(launched, std::vector{waiting});
}

TEST_F(EndpointTest, ATransferToADeadPeerEndsWithinASecond) {
  const auto peer = connected();
  lose(peer);
  const auto waiting = submit(peer);
  stage.advance(990ms);
  EXPECT_FALSE(waiting->done());
  stage.advance(10ms);
  expect_ended(waiting, Errc::peer_lost, "it does not answer");
}

TEST_F(EndpointTest, ALostQuestionIsAskedAgain) {
  const auto peer = connected();
  const auto waiting = submit(peer, "late");
  auto handle = find_region(peer, "other");
  const auto first = question();
  lose(peer);
  const std::size_t asked = said<FindRegionMessage>().size();
  pong();
  hear(round(), welcome());
  rails(peer, true);
  ASSERT_EQ(said<FindRegionMessage>().size(), asked + 2);
  EXPECT_GT(question(), first);
  rails(peer, true);
  EXPECT_EQ(said<FindRegionMessage>().size(), asked + 2) << "a further rail is no reason to ask again";
  for (const auto& [id, find] : said<FindRegionMessage>()) hear(id, RegionMessage{true, remote(find.name)});
  EXPECT_EQ(launched, std::vector{waiting});
  ASSERT_TRUE(ready(handle));
  EXPECT_EQ(handle.get().value()->name, "other");
}

TEST_F(EndpointTest, AQuestionToADeadPeerEndsWithinASecond) {
  const auto peer = connected();
  const auto waiting = submit(peer, "late");
  auto look_up = find_region(peer, "late");
  lose(peer);
  stage.advance(990ms);
  EXPECT_FALSE(waiting->done());
  stage.advance(10ms);
  expect_ended(waiting, Errc::peer_lost, "it does not answer");
  ASSERT_TRUE(ready(look_up));
  EXPECT_TRUE(look_up.get().status() == Errc::peer_lost);
}

TEST_F(EndpointTest, AQuestionToAPeerThatIsBackKeepsItsOwnLimit) {
  const auto peer = connected();
  const auto waiting = submit(peer, "late");
  lose(peer);
  pong();
  hear(round(), welcome());
  rails(peer, true);
  advance_in_touch(10s);
  EXPECT_FALSE(waiting->done());
  hear(question(), RegionMessage{true, remote("late")});
  EXPECT_EQ(launched, std::vector{waiting});
}

TEST_F(EndpointTest, ATransferForAnotherHandleIsRefused) {
  const auto stranger = peers.find_or_add("stranger", 99);
  expect_ended(submit(stranger), Errc::no_path, "call connect()");
  const auto peer = connected();
  expect_ended(submit(stranger), Errc::no_path);
  EXPECT_FALSE(submit(peer)->done());
}

TEST_F(EndpointTest, ACancelledTransferDoesNotWaitForItsAnswer) {
  const auto peer = connected();
  const auto kept = submit(peer, "late");
  const auto cancelled = submit(peer, "late");
  cancelled->cancel();
  stage.advance(500ms);
  expect_ended(cancelled, Errc::cancelled, "read with peer 'target' at tcp://10.0.0.2:7000 was cancelled");
  EXPECT_FALSE(kept->done());
}

// ---------------------------------------------------------------- look-ups

TEST_F(EndpointTest, FindsARegion) {
  const auto peer = connected();
  auto answer = find_region(peer, "late");
  EXPECT_FALSE(ready(answer));
  hear(question(), RegionMessage{true, remote("late")});
  ASSERT_TRUE(ready(answer));
  const auto found = answer.get();
  ASSERT_TRUE(found);
  EXPECT_EQ((*found)->name, "late");
  EXPECT_EQ((*found)->key, (RegionKey{7, 1}));
}

TEST_F(EndpointTest, SaysThatARegionIsMissing) {
  const auto peer = connected();
  auto answer = find_region(peer, "nope");
  hear(question(), RegionMessage{});
  ASSERT_TRUE(ready(answer));
  EXPECT_TRUE(answer.get().status() == Errc::unknown_region);
}

TEST_F(EndpointTest, ALookUpEndsInTime) {
  const auto peer = connected();
  auto answer = find_region(peer, "late");
  advance_in_touch(4900ms);
  EXPECT_FALSE(ready(answer));
  advance_in_touch(100ms);
  ASSERT_TRUE(ready(answer));
  EXPECT_TRUE(answer.get().status() == Errc::timed_out);
}

TEST_F(EndpointTest, ALookUpAtALostPeerIsRefused) {
  const auto peer = connected();
  lose(peer);
  auto answer = find_region(peer, "kv");
  ASSERT_TRUE(ready(answer));
  EXPECT_TRUE(answer.get().status() == Errc::peer_lost);
}

TEST_F(EndpointTest, ALookUpDuringAHandshakeWaitsForIt) {
  const auto peer = connected();
  pong(5, false);
  auto answer = find_region(peer, "late");
  EXPECT_TRUE(said<FindRegionMessage>().empty());
  hear(round(), welcome());
  rails(peer, true);
  hear(question(), RegionMessage{true, remote("late")});
  ASSERT_TRUE(ready(answer));
  EXPECT_TRUE(answer.get());
}

// ---------------------------------------------------------------- ends

TEST_F(EndpointTest, DisconnectSaysByeAndRefusesTheRest) {
  const auto peer = connected();
  const auto parked = submit(peer, "late");
  auto look_up = find_region(peer, "late");
  stage.send(endpoint(), Disconnect{peer});
  EXPECT_EQ(peer->state.load(), PeerState::closed);
  expect_ended(parked, Errc::cancelled, "was disconnected by this engine");
  ASSERT_TRUE(ready(look_up));
  EXPECT_TRUE(look_up.get().status() == Errc::cancelled);
  ASSERT_EQ(said<ByeMessage>().size(), 1u);
  EXPECT_EQ(said<ByeMessage>()[0].second.incarnation, own_life);
  EXPECT_EQ(plans->of<RemovePeer>().size(), 1u);
  EXPECT_EQ(peers.find_life(5), nullptr);
  expect_ended(submit(peer), Errc::cancelled);
  stage.send(endpoint(), Disconnect{peer});
  rails(peer, true);
  pong();
  EXPECT_EQ(peer->state.load(), PeerState::closed) << "nothing brings it back by itself";
  const std::size_t before = pings();
  stage.advance(5s);
  EXPECT_EQ(pings(), before);

  const auto again = connected();
  EXPECT_NE(again, peer);
  EXPECT_EQ(again->incarnation, peer->incarnation);
  EXPECT_EQ(control->of<Dial>().size(), 1u);
}

TEST_F(EndpointTest, DisconnectWhileConnectingAnswersTheWaiters) {
  auto answer = connect();
  hear(round(), welcome());
  stage.send(endpoint(), Disconnect{last_plan().peer});
  expect_error(answer, Errc::cancelled, "was disconnected");
}

TEST_F(EndpointTest, DisconnectOfAnotherHandleIsIgnored) {
  const auto peer = connected();
  stage.send(endpoint(), Disconnect{peers.find_or_add("stranger", 99)});
  EXPECT_EQ(peer->state.load(), PeerState::up);
  EXPECT_TRUE(said<ByeMessage>().empty());
}

TEST_F(EndpointTest, StopAnswersEverything) {
  const auto peer = connected();
  const auto parked = submit(peer, "late");
  auto look_up = find_region(peer, "late");
  pong(5, false);
  auto waiter = connect();
  const auto held = submit(peer);
  stage.send(endpoint(), StopEndpoint{{Errc::shutting_down, "the engine is being destroyed"}});
  expect_ended(parked, Errc::shutting_down, "the engine is being destroyed");
  expect_ended(held, Errc::shutting_down);
  expect_error(waiter, Errc::shutting_down);
  ASSERT_TRUE(ready(look_up));
  EXPECT_TRUE(look_up.get().status() == Errc::shutting_down);
  EXPECT_EQ(said<ByeMessage>().size(), 1u);
  ASSERT_EQ(control->of<HangUp>().size(), 1u);
  EXPECT_TRUE(std::holds_alternative<HangUp>(control->all().back())) << "bye first";
}

TEST_F(EndpointTest, StopOfAnUnusedEndpointSaysNothing) {
  stage.send(endpoint(), StopEndpoint{{Errc::shutting_down, "the engine is being destroyed"}});
  EXPECT_TRUE(control->of<SendControl>().empty());
}

TEST_F(EndpointTest, EvenAKilledEndpointAnswers) {
  const auto peer = connected();
  const auto parked = submit(peer, "late");
  pong(5, false);
  auto waiter = connect();
  stage.kill(endpoint());
  expect_ended(parked, Errc::shutting_down);
  expect_error(waiter, Errc::shutting_down);
}

// Whatever happens in whatever order: nobody who asked is left without an answer.
TEST_F(EndpointTest, NoAnswerIsEverForgotten) {
  for (unsigned seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto one_of = [&](unsigned n) { return static_cast<unsigned>(random() % n); };
    std::vector<ConnectAnswer> connects;
    std::vector<RegionAnswer> look_ups;
    std::vector<RefPtr<TransferState>> transfers;
    launched.clear();
    connects.push_back(connect());
    for (int i = 0; i < 300; ++i) {
      const auto known = peers.all();
      const PeerPtr peer = known.empty() ? peers.find_or_add("stranger", 99) : known[one_of(known.size())];
      switch (one_of(14)) {
        case 0:
          connects.push_back(connect());
          break;
        case 1:
        case 2:
          hear(round(), welcome(5 + one_of(2)));
          break;
        case 3:
          hear(round(), RefusedMessage{1, 1 + one_of(21), "no"});
          break;
        case 4:
        case 5:
          rails(peer, one_of(3) > 0, one_of(4) > 0);
          break;
        case 6:
        case 7:
          pong(5 + one_of(2), one_of(3) > 0);
          break;
        case 8:
          transfers.push_back(submit(peer, one_of(2) ? "late" : "", std::chrono::milliseconds(one_of(4000))));
          break;
        case 9:
          look_ups.push_back(find_region(peer, "late"));
          break;
        case 10:
          if (!said<FindRegionMessage>().empty()) hear(question(), RegionMessage{one_of(2) > 0, remote("late")});
          break;
        case 11:
          if (one_of(4) == 0) stage.send(endpoint(), Disconnect{peer});
          break;
        case 12:
          if (!transfers.empty()) transfers[one_of(transfers.size())]->cancel();
          break;
        default:
          stage.advance(std::chrono::milliseconds(one_of(10) == 0 ? 3000 : one_of(300)));
      }
      if (i % 100 == 99) {
        // Silence: every limit passes.
        stage.advance(10s);
        for (const auto& answer : connects) ASSERT_TRUE(ready(answer)) << "step " << i;
        for (const auto& answer : look_ups) ASSERT_TRUE(ready(answer)) << "step " << i;
        for (const auto& transfer : transfers) {
          const auto times = std::count(launched.begin(), launched.end(), transfer);
          ASSERT_EQ(times + transfer->done(), 1) << "step " << i << ": launched or ended, once";
        }
        control->clear();
        connects.push_back(connect());
      }
    }
  }
}

}  // namespace
}  // namespace kvferry
