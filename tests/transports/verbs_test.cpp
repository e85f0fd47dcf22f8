// RDMA on scripted devices: choosing them, registering, posting under refusal, ends and recovery.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <kvferry/transports/verbs/device.hpp>
#include <kvferry/transports/verbs/gid.hpp>
#include <kvferry/transports/verbs/registration.hpp>
#include <kvferry/transports/verbs/wire.hpp>

#include "verbs_fixture.hpp"

namespace kvferry::test {
namespace {

using namespace std::chrono_literals;
using namespace kvferry::verbs;

// ---------------------------------------------------------------- GIDs

RawGid ipv4(std::uint8_t a, std::uint8_t b, std::uint8_t c, std::uint8_t d) {
  return {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d};
}
RawGid ipv6(std::uint8_t first, std::uint8_t second, std::uint8_t last) {
  RawGid raw{};
  raw[0] = first;
  raw[1] = second;
  raw[15] = last;
  return raw;
}
const RawGid link_local = ipv6(0xfe, 0x80, 1);
const RawGid global = ipv6(0x20, 0x01, 7);

std::vector<std::uint32_t> indices(const std::vector<Gid>& gids) {
  std::vector<std::uint32_t> found;
  for (const Gid& gid : gids) found.push_back(gid.index);
  return found;
}

TEST(RankGids, PutsRoce2BeforeRoce1AndGlobalBeforeLinkLocal) {
  const std::vector<InterfaceAddress> here = {{link_local, 64}, {global, 64}, {ipv4(10, 0, 0, 1), 120}};
  const std::vector<Gid> table = {{link_local, 0, GidType::roce_v1},
                                  {link_local, 1, GidType::roce_v2},
                                  {global, 2, GidType::roce_v1},
                                  {global, 3, GidType::roce_v2},
                                  {ipv4(10, 0, 0, 1), 4, GidType::roce_v1},
                                  {ipv4(10, 0, 0, 1), 5, GidType::roce_v2}};
  EXPECT_EQ(indices(rank_gids(table, here)), (std::vector<std::uint32_t>{3, 5, 1, 2, 4, 0}));
}

TEST(RankGids, LeavesOutWhatNoInterfaceHas) {
  const std::vector<Gid> table = {{ipv4(10, 0, 0, 1), 0, GidType::roce_v2},
                                  {ipv4(10, 0, 0, 2), 1, GidType::roce_v2},
                                  {RawGid{}, 2, GidType::roce_v2}};
  const auto ranked = rank_gids(table, {{ipv4(10, 0, 0, 1), 120}});
  ASSERT_EQ(indices(ranked), std::vector<std::uint32_t>{0}) << "index 0 is a valid choice";
  EXPECT_EQ(ranked[0].prefix_bits, 120);
}

TEST(RankGids, KeepsInfiniBandGidsThatNeedNoInterface) {
  EXPECT_EQ(indices(rank_gids({{ipv6(0xfe, 0x80, 9), 0, GidType::infiniband}}, {})), std::vector<std::uint32_t>{0});
}

TEST(MatchGids, WantsOneFamilyAndPrefersOneSubnet) {
  const Gid four{ipv4(10, 0, 0, 1), 1, GidType::roce_v2, 120};
  const Gid other_four{ipv4(10, 9, 0, 1), 2, GidType::roce_v2, 120};
  const Gid six{global, 3, GidType::roce_v2, 64};
  const Gid their_four{ipv4(10, 9, 0, 7), 5, GidType::roce_v2, 120};
  auto pair = match_gids({six, four, other_four}, {their_four});
  ASSERT_TRUE(pair);
  EXPECT_EQ(pair->first.index, 2u) << "in their subnet";
  EXPECT_EQ(pair->second.index, 5u);
  pair = match_gids({six, four}, {their_four});
  ASSERT_TRUE(pair) << "a router may join them";
  EXPECT_EQ(pair->first.index, 1u);
  EXPECT_FALSE(match_gids({six}, {their_four}));
  const Gid old_four{ipv4(10, 9, 0, 7), 5, GidType::roce_v1, 120};
  EXPECT_FALSE(match_gids({four}, {old_four})) << "RoCE v1 and v2 do not understand each other";
}

TEST(MatchGids, TakesLinkLocalWhenThereIsNothingElse) {
  const Gid ours{link_local, 0, GidType::roce_v2, 64};
  const Gid theirs{ipv6(0xfe, 0x80, 2), 0, GidType::roce_v2, 64};
  EXPECT_TRUE(match_gids({ours}, {theirs}));
}

// ---------------------------------------------------------------- devices

TEST(ChooseDevices, WithoutAnyIsUnsupported) {
  ScriptedNic nic({});
  const auto made = make_verbs_transport({}, nic);
  ASSERT_FALSE(made);
  EXPECT_EQ(made.status(), Errc::unsupported);
  EXPECT_NE(made.status().text().find("no RDMA device"), std::string_view::npos);
}

TEST(ChooseDevices, ANameThatDoesNotExistListsThoseThatDo) {
  ScriptedNic nic({device("mlx5_0"), device("mlx5_1")});
  VerbsConfig config;
  config.devices = {"mlx5_7"};
  const auto made = make_verbs_transport(config, nic);
  ASSERT_FALSE(made);
  EXPECT_EQ(made.status(), Errc::invalid_argument);
  EXPECT_NE(made.status().text().find("'mlx5_7'; this host has: mlx5_0:1, mlx5_1:1"), std::string_view::npos)
      << made.status().text();
}

TEST(ChooseDevices, PortsThatAreDownAreLeftOutAndNamedWhenNothingIsLeft) {
  ScriptedNic nic({device("mlx5_0", IBV_PORT_DOWN), device("mlx5_1")});
  const auto both = make_verbs_transport({}, nic);
  ASSERT_TRUE(both) << both.status().to_string();
  EXPECT_EQ((*both)->paths(), 1u);
  VerbsConfig config;
  config.devices = {"mlx5_0"};
  const auto down = make_verbs_transport(config, nic);
  ASSERT_FALSE(down);
  EXPECT_EQ(down.status(), Errc::no_path);
  EXPECT_NE(down.status().text().find("mlx5_0:1: its port is down"), std::string_view::npos) << down.status().text();
}

TEST(ChooseDevices, AGidIndexThatIsNotThereIsAnError) {
  ScriptedNic nic({device("mlx5_0")});
  VerbsConfig config;
  config.gid_index = 9;
  EXPECT_EQ(make_verbs_transport(config, nic).status(), Errc::no_path);
  config.gid_index = 1;
  EXPECT_TRUE(make_verbs_transport(config, nic));
}

TEST(ChooseDevices, APortWithNothingButALinkLocalGidIsUsed) {
  PortFacts port;
  port.device = "mlx5_0";
  port.active = true;
  port.gids = rank_gids({{link_local, 0, GidType::roce_v2}}, {{link_local, 64}});
  const auto chosen = choose_ports({port}, {});
  ASSERT_TRUE(chosen) << chosen.status().to_string();
  ASSERT_EQ(chosen->size(), 1u);
  const Gid theirs{ipv6(0xfe, 0x80, 2), 3, GidType::roce_v2, 64};
  EXPECT_EQ(match_gids(chosen->front().gids, {theirs})->second.index, 3u);
}

TEST(ChooseDevices, OneNameMayMeanOnePort) {
  NicDevice two = device("mlx5_0");
  two.ports.push_back(two.ports[0]);
  ScriptedNic nic({two});
  EXPECT_EQ((*make_verbs_transport({}, nic))->paths(), 2u);
  VerbsConfig config;
  config.devices = {"mlx5_0:2"};
  EXPECT_EQ((*make_verbs_transport(config, nic))->paths(), 1u);
  EXPECT_EQ(nic.counts().contexts, 0u) << "what was opened is closed again";
  EXPECT_EQ(nic.counts().domains, 0u);
}

// ---------------------------------------------------------------- what is sent over the wire

TEST(VerbsWire, EverythingComesBackAndNothingElseIsTaken) {
  PortAddress address;
  address.port = 77;
  address.devices.push_back({"mlx5_0:1", true, 0, 4096, {{ipv4(10, 0, 0, 1), 3, GidType::roce_v2, 120}}});
  address.devices.push_back({"mlx5_1:1", false, 9, 2048, {}});
  const std::string packed = encode(address);
  const auto back = decode_port_address(packed);
  ASSERT_TRUE(back) << back.status().to_string();
  EXPECT_EQ(back->port, 77u);
  ASSERT_EQ(back->devices.size(), 2u);
  EXPECT_EQ(back->devices[0].gids, address.devices[0].gids);
  EXPECT_EQ(back->devices[1].lid, 9);

  ConnectRequest request;
  request.channel = 5;
  request.pairs = {{1, 2}, {3, 4}};
  const auto asked = decode_connect_request(encode(request));
  ASSERT_TRUE(asked) << asked.status().to_string();
  EXPECT_EQ(asked->pairs[1].psn, 4u);
  EXPECT_FALSE(is_close_request(encode(request)));
  EXPECT_TRUE(is_close_request(encode(CloseRequest{8})));
  EXPECT_EQ(decode_close_request(encode(CloseRequest{8}))->channel, 8u);
  for (std::size_t cut = 0; cut < packed.size(); ++cut)
    EXPECT_EQ(decode_port_address(packed.substr(0, cut)).status(), Errc::malformed) << cut;
  EXPECT_EQ(decode_connect_request(packed).status(), Errc::malformed);
  EXPECT_EQ(decode_connect_answer(packed).status(), Errc::malformed);
}

TEST(VerbsWire, KeysThatDoNotAddUpAreMalformed) {
  const RegionKeys good{0x1000, 100, 60, {1, 2}};
  const auto back = decode_keys(encode_keys({good}));
  ASSERT_TRUE(back) << back.status().to_string();
  EXPECT_EQ((*back)[0].keys, good.keys);
  EXPECT_EQ((*back)[0].key_at(59), 1u);
  EXPECT_EQ((*back)[0].key_at(60), 2u);
  EXPECT_EQ((*back)[0].room_at(50), 10u);
  RegionKeys bad = good;
  bad.keys.pop_back();
  EXPECT_EQ(decode_keys(encode_keys({bad})).status(), Errc::malformed);
  bad = good;
  bad.part_bytes = 0;
  EXPECT_EQ(decode_keys(encode_keys({bad})).status(), Errc::malformed);
  EXPECT_EQ(decode_keys("nonsense").status(), Errc::malformed);
}

// ---------------------------------------------------------------- two engines on scripted devices

TEST_F(VerbsTest, AChannelIsUpOnlyWhenPacketsComeThrough) {
  start({device("a")});
  nic->hold_requests(true);
  ChannelSpec spec;
  spec.address = target->port->address();
  spec.token = token;
  spec.target_incarnation = life;
  spec.give_up = Clock::now() + 300ms;
  const auto lost = initiator->port->open(spec);
  ASSERT_TRUE(lost);
  ASSERT_TRUE(step_until([&] { return initiator->events.down.contains(*lost); }));
  EXPECT_TRUE(initiator->events.up.empty()) << "connected, but nothing came through";
  EXPECT_EQ(initiator->events.down.at(*lost), Errc::unreachable);
  EXPECT_NE(initiator->events.down.at(*lost).text().find("no packet"), std::string_view::npos);
  nic->hold_requests(false);
  nic->fail_request(0, IBV_WC_RETRY_EXC_ERR);
  spec.give_up = Clock::now() + 5s;
  const auto unanswered = initiator->port->open(spec);
  ASSERT_TRUE(unanswered);
  ASSERT_TRUE(step_until([&] { return initiator->events.down.contains(*unanswered); }));
  EXPECT_EQ(initiator->events.down.at(*unanswered), Errc::channel_error);
  EXPECT_TRUE(initiator->events.up.empty());
  EXPECT_NE(open(), 0u);
}

TEST_F(VerbsTest, OneDoorbellCarriesAWholeBatch) {
  start({device("a")});
  regions(64 * 32 * kib);
  const ChannelId channel = open();
  std::vector<Slice> slices;
  for (std::uint64_t i = 0; i < 64; ++i) slices.push_back({(63 - i) * 32 * kib, i * 32 * kib, 16 * kib});
  const auto before = nic->counts();
  const WorkItem work = item(Op::read, slices);
  ASSERT_TRUE(carry_out(channel, std::span(&work, 1)));
  const auto after = nic->counts();
  EXPECT_EQ(after.doorbells - before.doorbells, 1u);
  EXPECT_EQ(after.requests - before.requests, 64u);
  EXPECT_LE(after.signalled - before.signalled, 4u);
  EXPECT_EQ(wrong(slices), 0u);
}

TEST_F(VerbsTest, PiecesThatTouchAtTheTargetShareARequest) {
  start({device("a")});
  regions(64 * kib);
  const ChannelId channel = open();
  // Contiguous there, in reverse order here.
  const auto slices = scattered(16, 4 * kib);
  const auto before = nic->counts().requests;
  const WorkItem work = item(Op::read, slices);
  ASSERT_TRUE(carry_out(channel, std::span(&work, 1)));
  EXPECT_EQ(nic->counts().requests - before, 1u);
  EXPECT_EQ(wrong(slices), 0u);
}

TEST_F(VerbsTest, ADepthOf16CarriesTenThousandRequests) {
  VerbsConfig config;
  config.queue_depth = 16;
  start({device("a")}, config);
  regions(20000 * 64);
  std::vector<Slice> slices;
  for (std::uint64_t i = 0; i < 10000; ++i) slices.push_back({(9999 - i) * 128, i * 128, 64});
  const ChannelId channel = open();
  std::vector<WorkItem> items;
  for (std::size_t i = 0; i < slices.size(); i += 1000)
    items.push_back(item(Op::read, std::span(slices).subspan(i, 1000)));
  ASSERT_TRUE(carry_out(channel, items));
  EXPECT_EQ(wrong(slices), 0u);
}

TEST_F(VerbsTest, AShortageAtEveryPlaceOfAChainIsResumedThere) {
  start({device("a")});
  regions(32 * kib);
  const ChannelId channel = open();
  std::vector<Slice> slices;
  for (std::uint64_t i = 0; i < 16; ++i) slices.push_back({(15 - i) * 2 * kib, i * 2 * kib, kib});
  for (std::uint64_t k = 0; k < 16; ++k) {
    std::memset(local->data, 0, local->size);
    const auto before = nic->counts().requests;
    nic->refuse_post(k, ENOMEM);
    const WorkItem work = item(Op::read, slices);
    const Status status = carry_out(channel, std::span(&work, 1));
    ASSERT_TRUE(status) << k << ": " << status.to_string();
    EXPECT_EQ(wrong(slices), 0u) << k;
    EXPECT_EQ(nic->counts().requests - before, 16u) << "each once, refused at " << k;
  }
}

TEST_F(VerbsTest, ARefusalForGoodEndsThatItemAloneAfterItsPrefix) {
  start({device("a")});
  regions(64 * kib);
  const ChannelId channel = open();
  std::vector<Slice> slices;
  for (std::uint64_t i = 0; i < 16; ++i) slices.push_back({(15 - i) * 2 * kib, i * 2 * kib, kib});
  const Slice apart{40 * kib, 40 * kib, kib};
  for (std::uint64_t k = 0; k < 16; ++k) {
    nic->refuse_post(k, EINVAL);
    const std::vector<WorkItem> items = {item(Op::read, slices), item(Op::read, {&apart, 1})};
    const Status status = carry_out(channel, items);
    EXPECT_EQ(status, Errc::internal) << k;
    EXPECT_NE(status.text().find("refuses a request"), std::string_view::npos) << status.text();
    EXPECT_TRUE(initiator->completions.at(items[1].cookie)) << "the other is not concerned";
    std::memset(local->data, 0x55, local->size);
    for (int i = 0; i < 20; ++i) step();
    EXPECT_TRUE(std::all_of(local->data, local->data + local->size, [](std::byte b) { return b == std::byte{0x55}; }))
        << "quiet after its end";
  }
  EXPECT_TRUE(initiator->events.down.empty());
}

TEST_F(VerbsTest, AFailedRequestEndsTheChannelAndEachItemOnce) {
  start({device("a")});
  regions(256 * kib);
  for (const ibv_wc_status cause : {IBV_WC_RETRY_EXC_ERR, IBV_WC_REM_OP_ERR, IBV_WC_LOC_QP_OP_ERR}) {
    const ChannelId channel = open();
    ASSERT_NE(channel, 0u);
    const auto slices = scattered(64, 4 * kib);
    std::vector<WorkItem> items;
    for (const Slice& slice : slices) items.push_back(item(Op::write, {&slice, 1}));
    nic->fail_request(20, cause);
    const std::size_t posted = initiator->port->post(channel, items);
    ASSERT_EQ(posted, items.size());
    ASSERT_TRUE(step_until([&] { return initiator->events.down.contains(channel); }));
    ASSERT_TRUE(step_until([&] {
      return std::ranges::all_of(items, [&](const auto& one) { return initiator->completions.contains(one.cookie); });
    }));
    std::size_t failed = 0;
    for (const WorkItem& one : items) {
      ASSERT_TRUE(initiator->completions.contains(one.cookie));
      const Status& status = initiator->completions.at(one.cookie);
      if (!status) {
        ++failed;
        EXPECT_EQ(status, Errc::channel_error) << status.to_string();
      }
    }
    EXPECT_GE(failed, 1u);
    EXPECT_EQ(initiator->events.down.at(channel), Errc::channel_error);
  }
}

TEST_F(VerbsTest, ADeviceThatHangsIsFencedWithinTheLimit) {
  start({device("a")});
  regions(64 * kib);
  const ChannelId channel = open();
  const auto slices = scattered(16, 4 * kib);
  const WorkItem work = item(Op::read, slices);
  nic->hang(true);
  ASSERT_EQ(initiator->port->post(channel, std::span(&work, 1)), 1u);
  const TimePoint begin = Clock::now();
  initiator->port->fence(channel, {Errc::timed_out, "the deadline passed"});
  ASSERT_TRUE(step_until([&] { return initiator->completions.contains(work.cookie); }));
  EXPECT_LT(Clock::now() - begin, 2s);
  nic->hang(false);
  std::memset(local->data, 0x11, local->size);
  for (int i = 0; i < 50; ++i) step();
  EXPECT_TRUE(std::all_of(local->data, local->data + local->size, [](std::byte b) { return b == std::byte{0x11}; }));
}

TEST_F(VerbsTest, AFenceWaitsForTheTargetToAgree) {
  start({device("a")});
  regions(64 * kib);
  const ChannelId channel = open();
  const auto slices = scattered(16, 4 * kib);
  const WorkItem work = item(Op::write, slices);
  nic->hold_requests(true);
  ASSERT_EQ(initiator->port->post(channel, std::span(&work, 1)), 1u);
  const std::size_t pairs = nic->counts().pairs;
  initiator->port->fence(channel, {Errc::timed_out, "the deadline passed"});
  ASSERT_TRUE(step_until([&] { return initiator->completions.contains(work.cookie); }));
  nic->hold_requests(false);
  EXPECT_EQ(nic->counts().pairs, pairs - 6) << "the target's queue pairs are gone too";
  EXPECT_EQ(initiator->completions.at(work.cookie), Errc::channel_error);
}

TEST_F(VerbsTest, ATargetThatIsGoneDoesNotHoldAFence) {
  start({device("a")});
  regions(64 * kib);
  const ChannelId channel = open();
  mute = true;
  const TimePoint begin = Clock::now();
  initiator->port->fence(channel, {Errc::timed_out, "the deadline passed"});
  ASSERT_TRUE(step_until([&] { return initiator->events.down.contains(channel); }));
  EXPECT_LT(Clock::now() - begin, 2s);
}

TEST_F(VerbsTest, APortThatGoesDownTakesItsChannelsAndComesBack) {
  start({device("a"), device("b")});
  regions(64 * kib);
  const ChannelId on_a = open(0);
  const ChannelId on_b = open(1);
  nic->set_port("a", 1, IBV_PORT_DOWN);
  const auto slices = scattered(16, 4 * kib);
  const WorkItem lost = item(Op::read, slices);
  initiator->port->post(on_a, std::span(&lost, 1));
  ASSERT_TRUE(step_until([&] { return initiator->events.down.contains(on_a); }));
  const WorkItem other = item(Op::read, slices);
  EXPECT_TRUE(carry_out(on_b, std::span(&other, 1))) << "the other rail works on";
  nic->set_port("a", 1, IBV_PORT_ACTIVE);
  const ChannelId again = open(0);
  const WorkItem work = item(Op::read, slices);
  EXPECT_TRUE(carry_out(again, std::span(&work, 1)));
  EXPECT_EQ(wrong(slices), 0u);
}

TEST_F(VerbsTest, ADeviceThatIsLostEndsOnlyWhatUsedIt) {
  start({device("a"), device("b")});
  regions(64 * kib);
  const ChannelId on_a = open(0);
  const ChannelId on_b = open(1);
  nic->lose_device("a");
  ASSERT_TRUE(step_until([&] { return initiator->events.down.contains(on_a); }));
  EXPECT_NE(initiator->events.down.at(on_a).text().find("a:1 has failed"), std::string_view::npos)
      << initiator->events.down.at(on_a).text();
  const auto slices = scattered(16, 4 * kib);
  const WorkItem work = item(Op::read, slices);
  EXPECT_TRUE(carry_out(on_b, std::span(&work, 1)));
}

TEST_F(VerbsTest, ARegionThatIsWithdrawnIsRefusedByTheDevice) {
  start({device("a")});
  regions(64 * kib);
  const ChannelId channel = open();
  nic->forget_remote_keys();
  const auto slices = scattered(16, 4 * kib);
  const WorkItem work = item(Op::read, slices);
  const Status status = carry_out(channel, std::span(&work, 1));
  EXPECT_EQ(status, Errc::unknown_region) << status.to_string();
}

TEST_F(VerbsTest, MessagesAndNotificationsNeverMeetAReceiverThatIsNotReady) {
  start({device("a")});
  regions(64 * kib);
  const ChannelId channel = open();
  std::vector<std::byte> text(max_message_bytes, std::byte{9});
  std::vector<WorkItem> items;
  for (int i = 0; i < 300; ++i) {
    WorkItem made;
    made.op = i % 2 == 0 ? Op::send : Op::write_imm;
    made.cookie = ++last_cookie;
    made.sequence = last_cookie;
    made.immediate = static_cast<std::uint32_t>(i);
    if (made.op == Op::send) made.message = text;
    items.push_back(made);
  }
  ASSERT_TRUE(carry_out(channel, items));
  EXPECT_EQ(target->events.messages.size(), 150u);
  EXPECT_EQ(target->events.immediates.size(), 150u);
  EXPECT_EQ(nic->counts().not_ready, 0u);
}

TEST_F(VerbsTest, RegistersInPartsWhereADeviceAsksForIt) {
  NicDevice small = device("a");
  small.max_mr_bytes = 8 * mib;
  start({small});
  regions(20 * mib + 123);
  EXPECT_EQ(nic->counts().regions, 8u + 2 * 3) << "three parts on either side, beside the buffers";
  const ChannelId channel = open();
  const Slice all{0, 0, 20 * mib + 123};
  std::vector<WorkItem> items;
  const PortLimits limits = initiator->port->limits();
  const std::span<const Slice> slices(&all, 1);
  for (SliceCursor cursor(slices); !cursor.at_end();) {
    WorkItem made = item(Op::read, {});
    made.slices = cursor.next(limits.item_bytes, limits.item_slices, limits.whole_bytes);
    items.push_back(made);
  }
  ASSERT_TRUE(carry_out(channel, items));
  EXPECT_EQ(wrong(slices), 0u);
}

TEST_F(VerbsTest, AMemlockLimitIsNamed) {
  NicDevice small = device("a");
  small.memlock_bytes = 64 * mib;
  start({small});
  auto record = allocate_region("large", 128 * mib, Access::read_write);
  ASSERT_TRUE(record);
  const auto added = target->regions.add(std::move(*record));
  ASSERT_TRUE(added);
  const auto descriptor = target->transport->register_region(**added);
  ASSERT_FALSE(descriptor);
  EXPECT_EQ(descriptor.status(), Errc::resource_exhausted);
  EXPECT_NE(descriptor.status().text().find("RLIMIT_MEMLOCK"), std::string_view::npos) << descriptor.status().text();
}

TEST_F(VerbsTest, AThousandConnectionsLeaveNothingBehind) {
  start({device("a")});
  regions(64 * kib);
  const auto before = nic->counts();
  const Slice slice{0, 0, kib};
  for (int i = 0; i < 1000; ++i) {
    const ChannelId channel = open();
    ASSERT_NE(channel, 0u);
    const WorkItem work = item(Op::read, {&slice, 1});
    ASSERT_TRUE(carry_out(channel, std::span(&work, 1)));
    initiator->port->fence(channel, {Errc::cancelled, "enough"});
    ASSERT_TRUE(step_until([&] { return initiator->events.down.contains(channel); }));
  }
  const auto after = nic->counts();
  EXPECT_EQ(after.pairs, before.pairs);
  EXPECT_EQ(after.regions, before.regions);
}

TEST_F(VerbsTest, SleepingIsSafe) {
  start({device("a")});
  regions(64 * kib);
  const ChannelId channel = open();
  const Slice slice{0, 0, kib};
  nic->hold_requests(true);
  const WorkItem work = item(Op::read, {&slice, 1});
  ASSERT_EQ(initiator->port->post(channel, std::span(&work, 1)), 1u);
  initiator->poll();
  EXPECT_EQ(initiator->port->progress(), Progress::waiting);
  EXPECT_GT(initiator->port->next_wakeup(), Clock::now()) << "armed, nothing there";
  nic->hold_requests(false);
  target->poll();  // the devices work when anybody looks
  const TimePoint wakeup = initiator->port->next_wakeup();
  EXPECT_LE(wakeup, Clock::now()) << "completed before it was armed again";
  initiator->poll();
  EXPECT_TRUE(initiator->completions.contains(work.cookie));
}

// ---------------------------------------------------------------- peers that are not alike

/// Some of a network's devices, and what else a side has of its own.
VerbsConfig using_devices(std::vector<std::string> names, int queue_pairs = 2) {
  VerbsConfig config;
  config.devices = std::move(names);
  config.queue_pairs = queue_pairs;
  return config;
}

TEST_F(VerbsTest, PeersMayDifferInQueuePairsAndMtu) {
  NicDevice narrow = device("narrow");
  narrow.ports[0].mtu = IBV_MTU_1024;
  for (const bool narrow_target : {true, false}) {
    nic = std::make_unique<ScriptedNic>(std::vector{device("wide"), narrow});
    const VerbsConfig wide = using_devices({"wide"}, 5);
    const VerbsConfig other = using_devices({"narrow"}, 1);
    start_sides(narrow_target ? other : wide, narrow_target ? wide : other);
    regions(64 * kib);
    const ChannelId channel = open();
    ASSERT_NE(channel, 0u);
    EXPECT_EQ(nic->counts().pairs, narrow_target ? 12u : 4u) << "as many as the initiator wants, on both sides";
    const auto slices = scattered(16, 4 * kib);
    const WorkItem work = item(Op::read, slices);
    ASSERT_TRUE(carry_out(channel, std::span(&work, 1)));
    EXPECT_EQ(wrong(slices), 0u);
    TearDown();  // where the nic says whether the path MTUs differed
  }
}

TEST_F(VerbsTest, PeersMayDifferInTheirDevices) {
  const std::vector<std::string> two = {"a", "b"};
  for (const bool more_here : {true, false}) {
    nic = std::make_unique<ScriptedNic>(std::vector{device("a"), device("b"), device("c")});
    start_sides(using_devices(more_here ? std::vector<std::string>{"c"} : two),
                using_devices(more_here ? two : std::vector<std::string>{"c"}));
    regions(64 * kib);
    const auto slices = scattered(16, 4 * kib);
    for (const std::uint32_t rail : {0u, 1u, 2u}) {
      const ChannelId channel = open(rail);
      ASSERT_NE(channel, 0u) << rail;
      std::memset(local->data, 0, local->size);
      const WorkItem work = item(Op::read, slices);
      ASSERT_TRUE(carry_out(channel, std::span(&work, 1))) << rail;
      EXPECT_EQ(wrong(slices), 0u) << rail;
    }
    TearDown();
  }
}

TEST_F(VerbsTest, ATargetThatIsKilledInAReadEndsItAndMemoryIsQuiet) {
  start({device("a")});
  regions(256 * kib);
  const ChannelId channel = open();
  const auto slices = scattered(64, 4 * kib);
  std::vector<WorkItem> items;
  for (const Slice& slice : slices) items.push_back(item(Op::read, {&slice, 1}));
  nic->hold_requests(true);
  ASSERT_EQ(initiator->port->post(channel, items), items.size());
  target.reset();
  nic->hold_requests(false);
  ASSERT_TRUE(step_until([&] { return initiator->events.down.contains(channel); }));
  ASSERT_TRUE(step_until([&] {
    return std::ranges::all_of(items, [&](const auto& one) { return initiator->completions.contains(one.cookie); });
  }));
  for (const WorkItem& one : items) EXPECT_EQ(initiator->completions.at(one.cookie), Errc::channel_error);
  EXPECT_NE(initiator->events.down.at(channel).text().find("the peer's device does not answer"), std::string_view::npos)
      << initiator->events.down.at(channel).text();
  std::memset(local->data, 0x42, local->size);
  for (int i = 0; i < 50; ++i) step();
  EXPECT_TRUE(std::all_of(local->data, local->data + local->size, [](std::byte b) { return b == std::byte{0x42}; }));
}

TEST_F(VerbsTest, ACompletionAfterTheDeadlineTouchesNothing) {
  start({device("a")});
  regions(64 * kib);
  const ChannelId channel = open();
  const auto slices = scattered(16, 4 * kib);
  const WorkItem late = item(Op::read, slices);
  nic->hold_requests(true);
  ASSERT_EQ(initiator->port->post(channel, std::span(&late, 1)), 1u);
  initiator->port->fence(channel, {Errc::timed_out, "the deadline passed"});
  ASSERT_TRUE(step_until([&] { return initiator->completions.contains(late.cookie); }));
  EXPECT_EQ(initiator->completions.at(late.cookie), Errc::channel_error);
  std::memset(local->data, 0x42, local->size);
  nic->hold_requests(false);
  for (int i = 0; i < 50; ++i) step();
  EXPECT_TRUE(std::all_of(local->data, local->data + local->size, [](std::byte b) { return b == std::byte{0x42}; }));
}

TEST_F(VerbsTest, ASliceOf2GiBAndAByteIsRightToItsEnd) {
  constexpr std::uint64_t bytes = 2048 * mib + 1;
  start({device("a")});
  // Sparse: only what is touched takes memory.
  local = initiator->add_region("local", bytes);
  served = target->add_region("served", bytes);
  remote = target->remote_view(*served);
  const ChannelId channel = open();
  const Slice all{0, 0, bytes};
  const PortLimits limits = initiator->port->limits();
  std::uint64_t total = 0;
  std::vector<SliceRange> ranges;
  for (SliceCursor cursor(std::span(&all, 1)); !cursor.at_end(); total += ranges.back().bytes)
    ranges.push_back(cursor.next(limits.item_bytes, limits.item_slices, limits.whole_bytes));
  EXPECT_EQ(total, bytes);
  for (const std::size_t which : {std::size_t{0}, ranges.size() - 2, ranges.size() - 1}) {
    const std::uint64_t at = ranges[which].skip;
    for (std::uint64_t i = 0; i < ranges[which].bytes; ++i) served->data[at + i] = pattern(at + i);
    WorkItem work = item(Op::read, {});
    work.slices = ranges[which];
    ASSERT_TRUE(carry_out(channel, std::span(&work, 1)));
    EXPECT_EQ(std::memcmp(local->data + at, served->data + at, ranges[which].bytes), 0) << at;
  }
  EXPECT_EQ(local->data[bytes - 1], pattern(bytes - 1));
}

}  // namespace
}  // namespace kvferry::test
