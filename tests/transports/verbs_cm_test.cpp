// Connecting RDMA channels through librdmacm, on scripted devices: the same channels as through the
// bootstrap, and what every step that fails leads to.
#include <cerrno>
#include <string>

#include <kvferry/transports/verbs/cm_wire.hpp>

#include "verbs_fixture.hpp"

namespace kvferry::test {
namespace {

using namespace std::chrono_literals;
using namespace kvferry::verbs;

// ---------------------------------------------------------------- private data

TEST(CmWire, EverythingFitsAndComesBack) {
  CmCall call;
  call.token.fill(std::byte{0xab});
  call.target_incarnation = ~std::uint64_t{0} - 1;
  call.channel = 0x0123456789abcdef;
  call.mtu = 4096;
  call.read_depth = 16;
  call.index = 16;
  call.pairs = 17;
  PrivateData data = encode(call);
  ASSERT_LE(data.size(), most_call_bytes);
  data.resize(most_call_bytes);  // as devices deliver it
  const auto back = decode_call(data);
  ASSERT_TRUE(back) << back.status().to_string();
  EXPECT_EQ(back->token, call.token);
  EXPECT_EQ(back->target_incarnation, call.target_incarnation);
  EXPECT_EQ(back->channel, call.channel);
  EXPECT_EQ(back->mtu, 4096u);
  EXPECT_EQ(back->read_depth, 16u);
  EXPECT_EQ(back->index, 16u);
  EXPECT_EQ(back->pairs, 17u);

  const auto reply = decode_reply(encode(CmReply{1024, 7, 32, 8}));
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->mtu, 1024u);
  EXPECT_EQ(reply->read_depth, 7u);
  EXPECT_EQ(reply->notifications, 32u);
  EXPECT_EQ(reply->messages, 8u);
}

TEST(CmWire, NothingElseIsTaken) {
  const PrivateData good = encode(CmCall{.index = 1, .pairs = 3});
  for (std::size_t cut = 0; cut < good.size(); ++cut)
    EXPECT_EQ(decode_call(std::span(good).first(cut)).status(), Errc::malformed) << cut;
  EXPECT_EQ(decode_call(encode(CmCall{.index = 3, .pairs = 3})).status(), Errc::malformed);
  EXPECT_EQ(decode_call(encode(CmCall{.index = 0, .pairs = 1})).status(), Errc::malformed);
  EXPECT_EQ(decode_call(encode(CmReply{})).status(), Errc::malformed);
  EXPECT_EQ(decode_reply(good).status(), Errc::malformed);
  EXPECT_EQ(decode_reply(encode(CmReply{1024, 1, 0, 8})).status(), Errc::malformed);
}

TEST(CmWire, ARefusalKeepsItsCodeAndAsMuchOfItsTextAsFits) {
  const Status shortly(Errc::stale_peer, "another life");
  EXPECT_EQ(decode_refusal(encode_refusal(shortly)), Errc::stale_peer);
  EXPECT_EQ(decode_refusal(encode_refusal(shortly)).text(), "another life");
  const PrivateData large = encode_refusal({Errc::no_path, std::string(1000, 'x')});
  EXPECT_LE(large.size(), most_refusal_bytes);
  EXPECT_EQ(decode_refusal(large), Errc::no_path);
  EXPECT_EQ(decode_refusal({}), Errc::malformed);
  PrivateData wrong = encode_refusal(shortly);
  wrong[1] = wrong[2] = std::byte{0xff};
  EXPECT_EQ(decode_refusal(wrong), Errc::malformed);
}

// ---------------------------------------------------------------- channels

class VerbsCmTest : public VerbsTest {
 protected:
  static VerbsConfig through_cm() {
    VerbsConfig config;
    config.connect = VerbsConnect::rdmacm;
    return config;
  }
  /// Why the channel did not come up.
  Status failure_of(const ChannelSpec& wanted) {
    const auto channel = initiator->port->open(wanted);
    if (!channel) return channel.status();
    const bool over = step_until([&] { return initiator->events.down.contains(*channel); });
    EXPECT_TRUE(over) << "neither up nor down";
    EXPECT_TRUE(initiator->events.up.empty());
    return over ? initiator->events.down.at(*channel) : Status();
  }
  static bool says(const Status& status, std::string_view part) {
    return status.text().find(part) != std::string_view::npos;
  }
};

TEST_F(VerbsCmTest, ConnectsEveryQueuePairWithoutTheControlConnection) {
  start({device("a")}, through_cm());
  mute = true;
  regions(64 * kib);
  const ChannelId channel = open();
  ASSERT_NE(channel, 0u);
  EXPECT_EQ(nic->cm().counts().connected, 3u) << "two for data, one for messages";
  const auto slices = scattered(16, 4 * kib);
  const WorkItem work = item(Op::read, slices);
  ASSERT_TRUE(carry_out(channel, std::span(&work, 1)));
  EXPECT_EQ(wrong(slices), 0u);
  EXPECT_EQ(nic->counts().pairs, 6u);
}

TEST_F(VerbsCmTest, EndsWithTheOtherSide) {
  start({device("a")}, through_cm());
  regions(64 * kib);
  const ChannelId channel = open();
  initiator->port->fence(channel, {Errc::cancelled, "enough"});
  ASSERT_TRUE(step_until([&] { return initiator->events.down.contains(channel); }));
  ASSERT_TRUE(step_until([&] { return nic->counts().pairs == 0; }));
  const ChannelId second = open();
  target.reset();  // as a peer that is killed: its kernel says so
  ASSERT_TRUE(step_until([&] { return initiator->events.down.contains(second); }));
  EXPECT_EQ(initiator->events.down.at(second), Errc::channel_error);
  EXPECT_TRUE(says(initiator->events.down.at(second), "has ended its connection"))
      << initiator->events.down.at(second).text();
}

TEST_F(VerbsCmTest, ATargetThatDoesNotListenIsNamed) {
  nic = std::make_unique<ScriptedNic>(std::vector{device("a")});
  start_sides({}, through_cm());
  const Status status = failure_of(spec());
  EXPECT_EQ(status, Errc::no_path);
  EXPECT_TRUE(says(status, "KVFERRY_VERBS_CONNECT")) << status.text();
}

TEST_F(VerbsCmTest, ATargetThatListensTakesTheBootstrapToo) {
  nic = std::make_unique<ScriptedNic>(std::vector{device("a")});
  start_sides(through_cm(), {});
  regions(64 * kib);
  EXPECT_NE(open(), 0u);
  EXPECT_EQ(nic->cm().counts().connected, 0u);
}

TEST_F(VerbsCmTest, InfiniBandPortsAreSentToTheBootstrap) {
  NicDevice infiniband = device("a");
  infiniband.ports[0].ethernet = false;
  infiniband.ports[0].lid = 3;
  start({infiniband}, through_cm());
  const Status status = failure_of(spec());
  EXPECT_EQ(status, Errc::unsupported);
  EXPECT_TRUE(says(status, "verbs.connect=bootstrap")) << status.text();
}

TEST_F(VerbsCmTest, AStrangerAndAnEarlierLifeAreRefusedWithTheReason) {
  start({device("a")}, through_cm());
  ChannelSpec stranger = spec();
  stranger.token.fill(std::byte{9});
  Status status = failure_of(stranger);
  EXPECT_EQ(status, Errc::access_denied) << status.text();
  ChannelSpec earlier = spec();
  earlier.target_incarnation = life + 1;
  status = failure_of(earlier);
  EXPECT_EQ(status, Errc::stale_peer);
  EXPECT_TRUE(says(status, "has restarted")) << status.text();
  ASSERT_TRUE(step_until([&] { return nic->counts().pairs == 0; }));
}

TEST_F(VerbsCmTest, EachStepThatFailsIsNamed) {
  start({device("a")}, through_cm());
  nic->cm().fail_addresses(EHOSTUNREACH);
  Status status = failure_of(spec());
  EXPECT_EQ(status, Errc::unreachable);
  EXPECT_TRUE(says(status, "finds no way from a:1 to 127.0.0.1") && says(status, "No route to host")) << status.text();
  nic->cm().fail_addresses(0);
  nic->cm().fail_routes(ETIMEDOUT);
  status = failure_of(spec());
  EXPECT_EQ(status, Errc::unreachable);
  EXPECT_TRUE(says(status, "timed out")) << status.text();
  nic->cm().fail_routes(0);
  nic->cm().reject_requests(8);
  status = failure_of(spec());
  EXPECT_EQ(status, Errc::unreachable);
  EXPECT_TRUE(says(status, "nobody listens at 127.0.0.1")) << status.text();
  nic->cm().reject_requests(10);
  EXPECT_EQ(failure_of(spec()), Errc::channel_error);
  nic->cm().reject_requests(0);
  nic->cm().fail_accept(ENOMEM);
  status = failure_of(spec());
  EXPECT_TRUE(says(status, "rdma_accept: Cannot allocate memory")) << status.text();
  EXPECT_NE(open(), 0u) << "and then it works";
}

TEST_F(VerbsCmTest, AnAddressThatTakesLongIsAskedForAgain) {
  start({device("a")}, through_cm());
  nic->cm().fail_addresses(ETIMEDOUT);
  const auto channel = initiator->port->open(spec());
  ASSERT_TRUE(channel);
  for (int i = 0; i < 20; ++i) step();
  EXPECT_FALSE(initiator->events.down.contains(*channel));
  nic->cm().fail_addresses(0);
  ASSERT_TRUE(step_until([&] { return std::ranges::count(initiator->events.up, *channel) == 1; }));
  nic->cm().fail_addresses(ETIMEDOUT);
  initiator->events.up.clear();
  EXPECT_EQ(failure_of(spec(200ms)), Errc::unreachable) << "but not for ever";
}

TEST_F(VerbsCmTest, ARequestThatIsLostEndsAtItsLimit) {
  start({device("a")}, through_cm());
  nic->cm().lose_requests(true);
  const TimePoint begin = Clock::now();
  const Status status = failure_of(spec(300ms));
  EXPECT_EQ(status, Errc::unreachable);
  EXPECT_LT(Clock::now() - begin, 2s);
}

TEST_F(VerbsCmTest, ADeviceThatIsRemovedEndsItsChannels) {
  start({device("a")}, through_cm());
  const ChannelId channel = open();
  nic->cm().remove_device("a");
  ASSERT_TRUE(step_until([&] { return initiator->events.down.contains(channel); }));
  EXPECT_TRUE(says(initiator->events.down.at(channel), "has been removed"))
      << initiator->events.down.at(channel).text();
  ASSERT_TRUE(step_until([&] { return nic->counts().pairs == 0; }));
}

TEST_F(VerbsCmTest, AThousandConnectionsLeaveNothingBehind) {
  start({device("a")}, through_cm());
  regions(64 * kib);
  const auto before = nic->counts();
  const auto ids = nic->cm().counts().ids;
  const Slice slice{0, 0, kib};
  for (int i = 0; i < 1000; ++i) {
    const ChannelId channel = open();
    ASSERT_NE(channel, 0u);
    const WorkItem work = item(Op::read, {&slice, 1});
    ASSERT_TRUE(carry_out(channel, std::span(&work, 1)));
    initiator->port->fence(channel, {Errc::cancelled, "enough"});
    ASSERT_TRUE(step_until([&] { return initiator->events.down.contains(channel); }));
  }
  ASSERT_TRUE(step_until([&] { return nic->counts().pairs == before.pairs; }));
  EXPECT_EQ(nic->counts().regions, before.regions);
  EXPECT_EQ(nic->cm().counts().ids, ids);
}

TEST_F(VerbsCmTest, AnEngineThatEndsWhileItConnectsLeavesNothingBehind) {
  start({device("a")}, through_cm());
  for (int steps = 0; steps < 8; ++steps) {
    const auto channel = initiator->port->open(spec());
    ASSERT_TRUE(channel);
    for (int i = 0; i < steps; ++i) (i % 2 == 0 ? initiator : target)->poll();
    initiator->port.reset();
    ASSERT_TRUE(step_until([&] { return nic->counts().pairs == 0; })) << steps;
    initiator->open_port();
  }
}

TEST_F(VerbsCmTest, SleepersAreWoken) {
  start({device("a")}, through_cm());
  target->poll();
  EXPECT_EQ(target->port->progress(), Progress::idle);
  ASSERT_GT(target->port->next_wakeup(), Clock::now());
  const auto channel = initiator->port->open(spec());
  ASSERT_TRUE(channel);
  initiator->poll();
  initiator->poll();
  initiator->poll();
  target->poll();
  EXPECT_GT(nic->counts().pairs, 3u) << "a poll after a sleep looks at what rang the bell";
}

}  // namespace
}  // namespace kvferry::test
