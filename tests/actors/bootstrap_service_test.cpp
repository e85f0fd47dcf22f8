#include <algorithm>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <gtest/gtest.h>

#include <kvferry/actors/bootstrap_service.hpp>

namespace kvferry {
namespace {

using namespace std::chrono_literals;

const TimePoint start{1h};

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

struct Dropped {
  SessionId session;
  Status why;
};

class BootstrapServiceTest : public testing::Test {
 protected:
  BootstrapServiceTest() : service(parts()) { service.set_ports({{"shm", "s-address"}, {"tcp", "t-address"}}); }

  BootstrapService::Parts parts() {
    BootstrapService::Parts made;
    made.identity = {"target", 77, "host-a", "10.0.0.7"};
    made.peers = &peers;
    made.regions = &regions;
    made.metrics = &metrics;
    made.descriptors = [](RegionKey key) {
      return std::vector<std::pair<std::string, std::string>>{{"tcp", "descriptor-" + std::to_string(key.slot)}};
    };
    made.drop_session = [this](SessionId session, const Status& why) { dropped.push_back({session, why}); };
    return made;
  }

  std::optional<ControlMessage> ask(std::uint64_t id, ControlBody body, TimePoint now = start) {
    const auto answer = service.answer(bytes_of(encode({id, std::move(body)})), now);
    if (!answer) return std::nullopt;
    auto decoded = decode(bytes_of(*answer));
    EXPECT_TRUE(decoded) << decoded.status().to_string();
    return std::move(*decoded);
  }
  template <class Body>
  Body answer_to(ControlBody body, TimePoint now = start) {
    const auto message = ask(9, std::move(body), now);
    if (!message || !std::holds_alternative<Body>(message->body)) {
      ADD_FAILURE() << "another answer, or none";
      return {};
    }
    EXPECT_EQ(message->id, 9u) << "an answer carries its question's number";
    return std::get<Body>(message->body);
  }
  HelloMessage hello(std::uint64_t life = 5) const { return {protocol_version, "initiator", life, "host-b"}; }

  std::shared_ptr<const RegionRecord> add_region(std::string name, std::byte* data, std::uint64_t size) {
    auto record = std::make_unique<RegionRecord>();
    record->name = std::move(name);
    record->data = data;
    record->size = size;
    record->access = Access::read;
    return regions.add(std::move(record)).value();
  }

  std::vector<std::byte> memory = std::vector<std::byte>(8192);
  PeerTable peers{77};
  RegionTable regions;
  MetricCounters metrics;
  std::vector<Dropped> dropped;
  BootstrapService service;
};

// ---------------------------------------------------------------- handshakes

TEST_F(BootstrapServiceTest, WelcomesAHello) {
  const auto kv = add_region("kv", memory.data(), 4096);
  const auto welcome = answer_to<WelcomeMessage>(hello());
  EXPECT_EQ(welcome.protocol, protocol_version);
  EXPECT_EQ(welcome.name, "target");
  EXPECT_EQ(welcome.incarnation, 77u);
  EXPECT_EQ(welcome.host_id, "host-a");
  EXPECT_EQ(welcome.data_host, "10.0.0.7");
  ASSERT_EQ(welcome.ports.size(), 2u);
  EXPECT_EQ(welcome.ports[0].transport, "shm");
  EXPECT_EQ(welcome.ports[1].address, "t-address");
  ASSERT_EQ(welcome.regions.size(), 1u);
  EXPECT_EQ(welcome.regions[0].name, "kv");
  EXPECT_EQ(welcome.regions[0].key, kv->key);
  EXPECT_EQ(welcome.regions[0].size, 4096u);
  EXPECT_EQ(welcome.regions[0].access, Access::read);
  EXPECT_EQ(welcome.regions[0].descriptors.at(0).second, "descriptor-" + std::to_string(kv->key.slot));
  const auto peer = peers.find_life(5);
  ASSERT_NE(peer, nullptr);
  EXPECT_EQ(peer->name, "initiator");
  EXPECT_EQ(peers.authorize(welcome.token), SessionId{peer->slot}) << "the token opens channels";
  EXPECT_EQ(metrics.handshakes_refused, 0u);
}

TEST_F(BootstrapServiceTest, WelcomesTheSameLifeAgainWithTheSameToken) {
  const auto first = answer_to<WelcomeMessage>(hello());
  EXPECT_EQ(answer_to<WelcomeMessage>(hello()).token, first.token);
  EXPECT_NE(answer_to<WelcomeMessage>(hello(6)).token, first.token);
}

TEST_F(BootstrapServiceTest, RefusesAnotherProtocolNamingBothVersions) {
  auto other = hello();
  other.protocol = protocol_version + 41;
  const auto refused = answer_to<RefusedMessage>(other);
  EXPECT_EQ(refused.code, static_cast<std::uint32_t>(Errc::version_mismatch));
  EXPECT_NE(refused.text.find("'initiator' speaks protocol version 42"), std::string::npos) << refused.text;
  EXPECT_NE(refused.text.find("'target' speaks 1"), std::string::npos) << refused.text;
  EXPECT_EQ(metrics.handshakes_refused, 1u);
  EXPECT_EQ(peers.find_life(5), nullptr);
}

TEST_F(BootstrapServiceTest, ARefusalCanAlwaysBeRead) {
  auto other = hello();
  other.protocol = 2;
  other.name = std::string(max_control_string, 'n');
  EXPECT_EQ(answer_to<RefusedMessage>(other).code, static_cast<std::uint32_t>(Errc::version_mismatch));
}

TEST_F(BootstrapServiceTest, RefusesAHelloThatNamesNobody) {
  for (const auto& [name, life] :
       {std::pair<std::string, std::uint64_t>{"", 5}, {std::string(256, 'n'), 5}, {"initiator", 0}}) {
    auto bad = hello(life);
    bad.name = name;
    EXPECT_EQ(answer_to<RefusedMessage>(bad).code, static_cast<std::uint32_t>(Errc::malformed));
  }
  auto longest = hello();
  longest.name = std::string(255, 'n');
  answer_to<WelcomeMessage>(longest);
}

TEST_F(BootstrapServiceTest, RefusesWhileNoPortIsOpen) {
  BootstrapService early(parts());
  const auto answer = early.answer(bytes_of(encode({1, hello()})), start);
  ASSERT_TRUE(answer);
  const auto decoded = decode(bytes_of(*answer));
  ASSERT_TRUE(decoded);
  ASSERT_TRUE(std::holds_alternative<RefusedMessage>(decoded->body));
  EXPECT_EQ(std::get<RefusedMessage>(decoded->body).code, static_cast<std::uint32_t>(Errc::unreachable));
}

// ---------------------------------------------------------------- pings and regions

TEST_F(BootstrapServiceTest, PongsSayWhetherTheSessionIsKnown) {
  auto pong = answer_to<PongMessage>(PingMessage{5});
  EXPECT_EQ(pong.incarnation, 77u);
  EXPECT_FALSE(pong.known);
  answer_to<WelcomeMessage>(hello());
  EXPECT_TRUE(answer_to<PongMessage>(PingMessage{5}).known);
  EXPECT_FALSE(answer_to<PongMessage>(PingMessage{6}).known);
}

TEST_F(BootstrapServiceTest, FindsRegionsForAConnectedEngineOnly) {
  const auto kv = add_region("kv", memory.data(), 4096);
  EXPECT_EQ(answer_to<RefusedMessage>(FindRegionMessage{5, "kv"}).code,
            static_cast<std::uint32_t>(Errc::access_denied));
  answer_to<WelcomeMessage>(hello());
  const auto found = answer_to<RegionMessage>(FindRegionMessage{5, "kv"});
  EXPECT_TRUE(found.found);
  EXPECT_EQ(found.region.key, kv->key);
  EXPECT_EQ(found.region.name, "kv");
  EXPECT_FALSE(answer_to<RegionMessage>(FindRegionMessage{5, "kv2"}).found);
  EXPECT_FALSE(answer_to<RegionMessage>(FindRegionMessage{5, ""}).found);
  ASSERT_TRUE(regions.retire(kv->key).is_ok());
  EXPECT_FALSE(answer_to<RegionMessage>(FindRegionMessage{5, "kv"}).found) << "a withdrawn region is not given out";
}

TEST_F(BootstrapServiceTest, TellsOfALeaseToItsHolderAlone) {
  const auto kv = add_region("kv", memory.data(), 4096);
  answer_to<WelcomeMessage>(hello(5));
  answer_to<WelcomeMessage>(hello(6));
  auto terms = std::make_unique<LeaseTerms>();
  terms->region = kv;
  terms->holder = peers.find_life(5)->slot;
  std::vector<ByteRange> ranges;
  for (std::uint64_t i = 0; i < 300; ++i) ranges.push_back({i * 8, 4});
  terms->ranges = RangeSet(ranges);
  terms->end = start + 10s;
  auto record = std::make_unique<RegionRecord>();
  record->name = "lease-1";
  record->data = kv->data;
  record->size = kv->size;
  record->access = Access::write;
  record->lease = std::move(terms);
  ASSERT_TRUE(regions.add(std::move(record)));

  auto found = answer_to<RegionMessage>(FindRegionMessage{5, "lease-1"}).region;
  ASSERT_TRUE(take_lease(found));
  ASSERT_TRUE(found.lease);
  EXPECT_TRUE(std::ranges::equal(found.lease->ranges(), ranges));
  EXPECT_EQ(found.descriptors.size(), 1u) << "only the transport's is left";
  const auto denied = static_cast<std::uint32_t>(Errc::access_denied);
  EXPECT_EQ(answer_to<RefusedMessage>(FindRegionMessage{6, "lease-1"}).code, denied) << "another engine";
  EXPECT_EQ(answer_to<RefusedMessage>(FindRegionMessage{5, "lease-1"}, start + 10s).code, denied) << "its time is over";
  EXPECT_EQ(answer_to<WelcomeMessage>(hello(7)).regions.size(), 1u) << "a welcome does not tell of leases";
}

// ---------------------------------------------------------------- the end of a session

TEST_F(BootstrapServiceTest, ByeEndsTheSessionOnce) {
  const auto token = answer_to<WelcomeMessage>(hello()).token;
  const auto slot = peers.find_life(5)->slot;
  EXPECT_EQ(ask(1, ByeMessage{5}), std::nullopt) << "a bye wants no answer";
  ASSERT_EQ(dropped.size(), 1u);
  EXPECT_EQ(dropped[0].session, slot);
  EXPECT_TRUE(dropped[0].why == Errc::peer_lost);
  EXPECT_EQ(peers.authorize(token), std::nullopt);
  ask(2, ByeMessage{5});
  ask(3, ByeMessage{6});
  EXPECT_EQ(dropped.size(), 1u);
  service.expire_sessions(start + 1h);
  EXPECT_EQ(dropped.size(), 1u);
}

TEST_F(BootstrapServiceTest, AByeFromAPeerWithoutSessionDropsNothing) {
  peers.find_or_add("we-connected-to-it", 5);
  ask(1, ByeMessage{5});
  EXPECT_TRUE(dropped.empty());
}

TEST_F(BootstrapServiceTest, SilenceEndsTheSessionOnce) {
  answer_to<WelcomeMessage>(hello(5));
  answer_to<WelcomeMessage>(hello(6));
  answer_to<PongMessage>(PingMessage{6}, start + 10s);
  service.expire_sessions(start);
  EXPECT_TRUE(dropped.empty());
  service.expire_sessions(start + 5s);
  ASSERT_EQ(dropped.size(), 1u);
  EXPECT_EQ(dropped[0].session, peers.find_life(5)->slot);
  EXPECT_TRUE(dropped[0].why == Errc::peer_lost);
  EXPECT_NE(dropped[0].why.text().find("'initiator'"), std::string_view::npos);
  service.expire_sessions(start + 5s);
  EXPECT_EQ(dropped.size(), 1u);
  EXPECT_FALSE(answer_to<PongMessage>(PingMessage{5}).known);
  EXPECT_TRUE(answer_to<PongMessage>(PingMessage{6}).known);
}

TEST_F(BootstrapServiceTest, EveryQuestionIsASignOfLife) {
  answer_to<WelcomeMessage>(hello());
  answer_to<RegionMessage>(FindRegionMessage{5, "kv"}, start + 10s);
  service.expire_sessions(start + 9s);
  EXPECT_TRUE(dropped.empty());
  answer_to<WelcomeMessage>(hello(), start + 20s);
  service.expire_sessions(start + 19s);
  EXPECT_TRUE(dropped.empty());
}

// ---------------------------------------------------------------- noise

TEST_F(BootstrapServiceTest, AnswersOfOthersAreNoQuestions) {
  for (const ControlBody& body : {ControlBody(WelcomeMessage{}), ControlBody(RefusedMessage{}),
                                  ControlBody(PongMessage{}), ControlBody(RegionMessage{})})
    EXPECT_EQ(ask(1, body), std::nullopt);
  EXPECT_EQ(metrics.malformed_messages, 0u);
}

TEST_F(BootstrapServiceTest, TruncatedMessagesGetNoAnswer) {
  const std::string whole = encode({1, hello()});
  for (std::size_t length = 0; length < whole.size(); ++length)
    EXPECT_EQ(service.answer(bytes_of(whole.substr(0, length)), start), std::nullopt) << length;
  EXPECT_EQ(metrics.malformed_messages, whole.size());
  EXPECT_TRUE(peers.all().empty());
}

TEST_F(BootstrapServiceTest, RandomBytesGetNoAnswer) {
  std::mt19937_64 random(7);
  for (std::uint64_t i = 1; i <= 10000; ++i) {
    std::string noise(random() % 200, '\0');
    for (char& byte : noise) byte = static_cast<char>(random());
    ASSERT_EQ(service.answer(bytes_of(noise), start), std::nullopt) << "case " << i;
    ASSERT_EQ(metrics.malformed_messages, i);
  }
  EXPECT_TRUE(peers.all().empty());
}

// Damage may leave a message whole (a letter of a name), but an answer can always be read, and what can
// not be read is counted.
TEST_F(BootstrapServiceTest, DamagedMessagesNeverBreakIt) {
  std::mt19937_64 random(8);
  const std::vector<std::string> originals{encode({1, hello()}), encode({2, PingMessage{5}}),
                                           encode({3, FindRegionMessage{5, "kv"}}), encode({4, ByeMessage{5}})};
  for (int i = 0; i < 20000; ++i) {
    std::string damaged = originals[random() % originals.size()];
    for (std::size_t n = 1 + random() % 4; n > 0; --n) damaged[random() % damaged.size()] = static_cast<char>(random());
    const bool readable = decode(bytes_of(damaged)).is_ok();
    const auto before = metrics.malformed_messages.load();
    const auto answer = service.answer(bytes_of(damaged), start);
    ASSERT_EQ(metrics.malformed_messages, before + (readable ? 0 : 1)) << "case " << i;
    ASSERT_TRUE(!answer || decode(bytes_of(*answer))) << "case " << i;
  }
}

TEST_F(BootstrapServiceTest, AnotherSchemaIsToldSo) {
  std::string other = encode({1, hello()});
  const auto place = other.find("\xa1v\x01");
  ASSERT_NE(place, std::string::npos);
  other[place + 2] = 7;
  const auto answer = service.answer(bytes_of(other), start);
  ASSERT_TRUE(answer);
  const auto decoded = decode(bytes_of(*answer));
  ASSERT_TRUE(decoded);
  const auto* refused = std::get_if<RefusedMessage>(&decoded->body);
  ASSERT_NE(refused, nullptr);
  EXPECT_EQ(refused->code, static_cast<std::uint32_t>(Errc::version_mismatch));
  EXPECT_NE(refused->text.find('7'), std::string::npos) << refused->text;
  EXPECT_NE(refused->text.find('1'), std::string::npos) << refused->text;
}

}  // namespace
}  // namespace kvferry
