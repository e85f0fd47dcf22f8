// One suite for every transport: the eight points of transports/transport.hpp.
#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <map>
#include <memory>
#include <numeric>

#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <kvferry/transports/shm/options.hpp>
#include <kvferry/transports/shm/shm_transport.hpp>
#include <kvferry/transports/tcp/tcp_transport.hpp>

#if KVFERRY_HAS_VERBS
#include <kvferry/transports/verbs/verbs_transport.hpp>

#include "tests/support/scripted_nic.hpp"
#endif

#include "contract_fixture.hpp"

namespace kvferry::test {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t mib = 1 << 20;
constexpr std::byte poison{0xEE};
constexpr std::byte settled{0x11};

bool holds_only(std::span<const std::byte> bytes, std::byte value) {
  return std::ranges::all_of(bytes, [value](std::byte byte) { return byte == value; });
}

std::span<std::byte> bytes_of(const RegionRecord& record) { return {record.data, record.size}; }

std::vector<std::byte> copy_of(const RegionRecord& record) { return {record.data, record.data + record.size}; }

// ---- lengths, offsets, scattering

TEST_P(ContractTest, ReadsAndWritesEveryKindOfLength) {
  const auto local = initiator.add_region("local", 4 * mib);
  const auto served = target.add_region("served", 4 * mib);
  const RemoteRegion remote = target.remote_view(*served);
  const ChannelId channel = open_channel();
  ASSERT_NE(channel, 0u) << open_error.to_string();
  for (const std::uint64_t length : {0ul, 1ul, 2ul, 7ul, 4095ul, 4096ul, 4097ul, 65537ul, mib - 1, mib, 3 * mib + 5}) {
    for (const Op op : {Op::read, Op::write}) {
      fill_random(*local);
      fill_random(*served);
      const Slice slice{13, 77, length};
      std::vector<std::byte> expected = copy_of(op == Op::read ? *local : *served);
      const RegionRecord& from = op == Op::read ? *served : *local;
      const std::uint64_t from_offset = op == Op::read ? 77 : 13;
      const std::uint64_t to_offset = op == Op::read ? 13 : 77;
      std::memcpy(expected.data() + to_offset, from.data + from_offset, length);
      const WorkItem empty = item(op, *local, remote, {&slice, 1, 0, 0});
      const Status status =
          length == 0 ? carry_out(channel, std::span(&empty, 1)) : transfer(channel, op, *local, remote, {&slice, 1});
      ASSERT_TRUE(status) << status.to_string();
      EXPECT_TRUE(std::ranges::equal(expected, bytes_of(op == Op::read ? *local : *served))) << length;
    }
  }
}

TEST_P(ContractTest, ScatteredSlicesLandWhereANaiveCopyPutsThem) {
  const auto local = initiator.add_region("local", 8 * mib);
  const auto served = target.add_region("served", 8 * mib);
  const RemoteRegion remote = target.remote_view(*served);
  const ChannelId channel = open_channel();
  ASSERT_NE(channel, 0u) << open_error.to_string();
  for (const std::size_t count : {3, 100, 2500}) {
    fill_random(*local);
    fill_random(*served);
    const std::vector<Slice> slices = scattered(8 * mib, count);
    std::vector<std::byte> expected = copy_of(*local);
    for (const Slice& slice : slices) {
      std::memcpy(expected.data() + slice.local_offset, served->data + slice.remote_offset, slice.length);
    }
    ASSERT_TRUE(transfer(channel, Op::read, *local, remote, slices));
    EXPECT_TRUE(std::ranges::equal(expected, bytes_of(*local))) << "read of " << count;

    fill_random(*local);
    expected = copy_of(*served);
    for (const Slice& slice : slices) {
      std::memcpy(expected.data() + slice.remote_offset, local->data + slice.local_offset, slice.length);
    }
    ASSERT_TRUE(transfer(channel, Op::write, *local, remote, slices));
    EXPECT_TRUE(std::ranges::equal(expected, bytes_of(*served))) << "write of " << count;
  }
}

TEST_P(ContractTest, NeighboursThatTouchOnOneSideOnlyStayApartOnTheOther) {
  const auto local = initiator.add_region("local", 1000);
  const auto served = target.add_region("served", 1000);
  const RemoteRegion remote = target.remote_view(*served);
  const ChannelId channel = open_channel();
  ASSERT_NE(channel, 0u) << open_error.to_string();
  fill_random(*served);
  const std::array slices{Slice{0, 500, 10}, Slice{10, 600, 20}, Slice{300, 620, 30}, Slice{200, 650, 40}};
  ASSERT_TRUE(transfer(channel, Op::read, *local, remote, slices));
  for (const Slice& slice : slices) {
    EXPECT_EQ(std::memcmp(local->data + slice.local_offset, served->data + slice.remote_offset, slice.length), 0);
  }
}

TEST_P(ContractTest, OffsetsOver4GiBAreRight) {
  if (GetParam().pins) GTEST_SKIP() << "the device would pin 8 GiB";
  constexpr std::uint64_t far = (4ull << 30) + 123457;
  const auto local = initiator.add_region("local", far + mib);
  const auto served = target.add_region("served", far + mib);
  const RemoteRegion remote = target.remote_view(*served);
  const ChannelId channel = open_channel();
  ASSERT_NE(channel, 0u) << open_error.to_string();
  for (std::uint64_t i = 0; i < 1000; ++i) {
    served->data[far + i] = static_cast<std::byte>(i * 7);
    served->data[i] = static_cast<std::byte>(i * 3);
  }
  const std::array reads{Slice{far + 5, far, 1000}, Slice{5, 0, 1000}};
  ASSERT_TRUE(transfer(channel, Op::read, *local, remote, reads));
  EXPECT_EQ(std::memcmp(local->data + far + 5, served->data + far, 1000), 0);
  EXPECT_EQ(std::memcmp(local->data + 5, served->data, 1000), 0);
  const std::array writes{Slice{5, far + 5000, 1000}};
  ASSERT_TRUE(transfer(channel, Op::write, *local, remote, writes));
  EXPECT_EQ(std::memcmp(served->data + far + 5000, served->data, 1000), 0);
}

// Ports never get more than limits().item_bytes at once, so what they see of such a slice is a range
// somewhere inside it.
TEST_P(ContractTest, RangesOfASliceOver4GiBAreRight) {
  if (GetParam().pins) GTEST_SKIP() << "the device would pin 8 GiB";
  constexpr std::uint64_t four_gib = 4ull << 30;
  const auto local = initiator.add_region("local", four_gib + 2 * mib);
  const auto served = target.add_region("served", four_gib + 2 * mib);
  const RemoteRegion remote = target.remote_view(*served);
  const ChannelId channel = open_channel();
  ASSERT_NE(channel, 0u) << open_error.to_string();
  const Slice slice{mib, 5, four_gib + mib};
  constexpr std::uint64_t bytes = 5000;
  for (const std::uint64_t skip :
       std::initializer_list<std::uint64_t>{0, four_gib - 2000, four_gib + 1, four_gib + mib - bytes}) {
    for (std::uint64_t i = 0; i < bytes; ++i) served->data[5 + skip + i] = static_cast<std::byte>(skip / 1000 + i * 7);
    const WorkItem read = item(Op::read, *local, remote, {&slice, 1, skip, bytes});
    ASSERT_TRUE(carry_out(channel, std::span(&read, 1)));
    EXPECT_EQ(std::memcmp(local->data + mib + skip, served->data + 5 + skip, bytes), 0) << skip;
    std::memset(served->data + 5 + skip, 0, bytes);
    const WorkItem write = item(Op::write, *local, remote, {&slice, 1, skip, bytes});
    ASSERT_TRUE(carry_out(channel, std::span(&write, 1)));
    EXPECT_EQ(std::memcmp(local->data + mib + skip, served->data + 5 + skip, bytes), 0) << skip;
  }
}

// ---- what the target refuses

TEST_P(ContractTest, SlicesThatLeaveTheRegionAreRefusedByTheTarget) {
  if (!GetParam().target_checks) GTEST_SKIP() << "the target's CPU takes no part";
  const auto local = initiator.add_region("local", mib);
  const auto served = target.add_region("served", mib);
  RemoteRegion remote = target.remote_view(*served);
  remote.size = ~0ull;  // so that only the target knows better
  const ChannelId channel = open_channel();
  ASSERT_NE(channel, 0u) << open_error.to_string();
  const auto before = copy_of(*served);
  for (const Op op : {Op::read, Op::write}) {
    for (const Slice& bad : {Slice{0, mib - 9, 10}, Slice{0, mib + 1, 1}, Slice{0, ~0ull - 3, 8}, Slice{0, ~0ull, 1}}) {
      const std::array slices{Slice{100, 100, 50}, bad};
      const WorkItem work = item(op, *local, remote, whole(slices));
      const Status status = carry_out(channel, std::span(&work, 1));
      EXPECT_EQ(status, Errc::out_of_bounds) << status.to_string();
      EXPECT_NE(status.text().find("served"), std::string::npos) << status.text();
      EXPECT_NE(status.text().find(std::to_string(bad.remote_offset)), std::string::npos) << status.text();
    }
  }
  EXPECT_TRUE(std::ranges::equal(before, bytes_of(*served))) << "a refused write left something";
  const Slice good{0, 0, mib};
  EXPECT_TRUE(transfer(channel, Op::read, *local, remote, {&good, 1})) << "the channel must live on";
}

TEST_P(ContractTest, AccessThatARegionDoesNotAllowIsRefused) {
  if (!GetParam().target_checks) GTEST_SKIP() << "the target's CPU takes no part";
  const auto local = initiator.add_region("local", mib);
  const auto readable = target.add_region("readable", mib, Access::read);
  const auto writable = target.add_region("writable", mib, Access::write);
  const RemoteRegion to_read = target.remote_view(*readable);
  const RemoteRegion to_write = target.remote_view(*writable);
  const ChannelId channel = open_channel();
  ASSERT_NE(channel, 0u) << open_error.to_string();
  fill_random(*local);
  const Slice slice{0, 0, 300000};
  EXPECT_EQ(transfer(channel, Op::write, *local, to_read, {&slice, 1}), Errc::access_denied);
  EXPECT_TRUE(holds_only(bytes_of(*readable), std::byte{0}));
  EXPECT_EQ(transfer(channel, Op::read, *local, to_write, {&slice, 1}), Errc::access_denied);
  EXPECT_TRUE(transfer(channel, Op::write, *local, to_write, {&slice, 1}));
  EXPECT_TRUE(transfer(channel, Op::read, *local, to_read, {&slice, 1}));
}

TEST_P(ContractTest, ARegionThatIsNotThereIsUnknown) {
  const auto local = initiator.add_region("local", mib);
  const auto served = target.add_region("served", mib);
  const RemoteRegion retired = target.remote_view(*served);
  RemoteRegion never = retired;
  never.key.generation += 17;
  const ChannelId channel = open_channel();
  ASSERT_NE(channel, 0u) << open_error.to_string();
  const Slice slice{0, 0, 300000};
  if (GetParam().target_checks) {
    EXPECT_EQ(transfer(channel, Op::read, *local, never, {&slice, 1}), Errc::unknown_region);
    EXPECT_EQ(transfer(channel, Op::write, *local, never, {&slice, 1}), Errc::unknown_region);
  }
  EXPECT_TRUE(transfer(channel, Op::read, *local, retired, {&slice, 1}));
  ASSERT_TRUE(target.regions.retire(served->key));
  ASSERT_TRUE(step_until([&] { return target.port->release_region(served->key, false); }));
  target.unregister(*served);
  EXPECT_EQ(transfer(channel, Op::read, *local, retired, {&slice, 1}), Errc::unknown_region);
  // Where no CPU of the target takes part, the mistake costs the channel.
  const ChannelId next = GetParam().target_checks ? channel : open_channel();
  EXPECT_EQ(transfer(next, Op::write, *local, retired, {&slice, 1}), Errc::unknown_region);
}

// ---- post and completions

TEST_P(ContractTest, PostTakesAPrefixAndEveryItemCompletesOnce) {
  const auto local = initiator.add_region("local", mib);
  const auto served = target.add_region("served", mib);
  const RemoteRegion remote = target.remote_view(*served);
  const ChannelId channel = open_channel();
  ASSERT_NE(channel, 0u) << open_error.to_string();
  fill_random(*served);
  const std::size_t count = 10 * initiator.port->limits().channel_items;
  const std::uint64_t length = mib / count;
  std::vector<Slice> slices;
  for (std::size_t i = 0; i < count; ++i) slices.push_back({i * length, i * length, length});
  std::vector<WorkItem> items;
  for (const Slice& slice : slices) items.push_back(item(Op::read, *local, remote, {&slice, 1, 0, length}));
  const std::size_t taken = initiator.port->post(channel, items);
  EXPECT_GT(taken, 0u);
  EXPECT_LT(taken, count) << "memory in flight must be bounded";
  ASSERT_TRUE(carry_out(channel, std::span(items).subspan(taken)));
  ASSERT_TRUE(step_until([&] { return is_complete(items); }));
  EXPECT_TRUE(first_error(items));
  step(200);
  EXPECT_EQ(initiator.completions.size(), count);
  EXPECT_EQ(std::memcmp(local->data, served->data, count * length), 0);
  EXPECT_EQ(initiator.port->progress(), Progress::idle);
}

TEST_P(ContractTest, NothingIsTakenWithoutAChannel) {
  const auto local = initiator.add_region("local", mib);
  const auto served = target.add_region("served", mib);
  const RemoteRegion remote = target.remote_view(*served);
  const Slice slice{0, 0, 100};
  const WorkItem work = item(Op::read, *local, remote, {&slice, 1, 0, 100});
  EXPECT_EQ(initiator.port->post(7, std::span(&work, 1)), 0u);
  initiator.port->cancel(7, work.cookie);
  initiator.port->fence(7, {Errc::cancelled, "nothing there"});
  const Result<ChannelId> connecting = initiator.port->open(spec());
  ASSERT_TRUE(connecting) << connecting.status().to_string();
  EXPECT_EQ(initiator.port->post(*connecting, std::span(&work, 1)), 0u) << "not up yet";
  step(50);
  EXPECT_TRUE(initiator.completions.empty());
}

TEST_P(ContractTest, ChannelsWorkSideBySideAndInBothDirections) {
  const auto local = initiator.add_region("local", 2 * mib);
  const auto served = target.add_region("served", 2 * mib);
  const RemoteRegion remote = target.remote_view(*served);
  const RemoteRegion back = initiator.remote_view(*local);
  const ChannelId first = open_channel();
  const ChannelId second = open_channel();
  ASSERT_NE(first, 0u);
  ASSERT_NE(second, 0u);
  ASSERT_NE(first, second);
  initiator.events.sessions[token] = 3;
  ChannelSpec reverse = spec();
  reverse.address = initiator.port->address();
  reverse.target_incarnation = initiator.context.incarnation;
  const Result<ChannelId> third = target.port->open(reverse);
  ASSERT_TRUE(third);
  ASSERT_TRUE(step_until([&] { return std::ranges::count(target.events.up, *third) == 1; }));

  fill_random(*served);
  const Slice low{0, 0, mib};
  const Slice high{mib, mib, mib / 2};
  const std::uint64_t bytes = mib / 2;
  const WorkItem one = item(Op::read, *local, remote, {&low, 1, 0, bytes});
  const WorkItem two = item(Op::read, *local, remote, {&high, 1, 0, bytes});
  const Slice own{mib + mib / 2, 0, bytes};
  const WorkItem three = item(Op::read, *served, back, {&own, 1, 0, bytes});
  ASSERT_EQ(initiator.port->post(first, std::span(&one, 1)), 1u);
  ASSERT_EQ(initiator.port->post(second, std::span(&two, 1)), 1u);
  ASSERT_TRUE(step_until([&] { return initiator.completions.size() == 2; }));
  ASSERT_EQ(target.port->post(*third, std::span(&three, 1)), 1u);
  ASSERT_TRUE(step_until([&] { return target.completions.size() == 1; }));
  EXPECT_TRUE(target.completions.at(three.cookie));
  EXPECT_EQ(std::memcmp(local->data, served->data, bytes), 0);
  EXPECT_EQ(std::memcmp(local->data + mib, served->data + mib, bytes), 0);
  EXPECT_EQ(std::memcmp(served->data + mib + mib / 2, local->data, bytes), 0);
}

TEST_P(ContractTest, WaitFdReportsWhatArrivesAtAnIdlePort) {
  const auto local = initiator.add_region("local", mib);
  const auto served = target.add_region("served", mib);
  const RemoteRegion remote = target.remote_view(*served);
  const ChannelId channel = open_channel();
  ASSERT_NE(channel, 0u) << open_error.to_string();
  step_for(5ms);
  const auto readable = [](const Side& side, int limit_ms) {
    pollfd waiting{side.port->wait_fd(), POLLIN, 0};
    return ::poll(&waiting, 1, limit_ms) == 1;
  };
  ASSERT_EQ(target.port->progress(), Progress::idle);
  ASSERT_FALSE(readable(target, 0));
  EXPECT_EQ(target.port->next_wakeup(), TimePoint::max());
  const std::byte hello[3] = {};
  const WorkItem work = message_item(hello, 1);
  ASSERT_EQ(initiator.port->post(channel, std::span(&work, 1)), 1u);
  // A transport may need the initiator's next poll to send.
  ASSERT_TRUE(step_until([&] {
    initiator.poll();
    if (readable(target, 10)) return true;
    return !target.events.messages.empty();
  }));
  ASSERT_TRUE(step_until([&] { return initiator.completions.contains(work.cookie); }));
}

// ---- immediates and messages

TEST_P(ContractTest, AnImmediateComesAfterItsData) {
  const auto local = initiator.add_region("local", 4 * mib);
  const auto served = target.add_region("served", 4 * mib);
  const RemoteRegion remote = target.remote_view(*served);
  const ChannelId channel = open_channel();
  ASSERT_NE(channel, 0u) << open_error.to_string();
  const std::uint64_t most = initiator.port->limits().item_bytes;
  std::size_t seen = 0;
  Slice slice{};
  target.events.when_notified = [&](std::uint32_t) {
    ++seen;
    EXPECT_EQ(std::memcmp(served->data + slice.remote_offset, local->data + slice.local_offset, slice.length), 0);
  };
  for (std::uint32_t i = 0; i < 50; ++i) {
    fill_random(*local);
    slice = {random_below(mib), random_below(mib), 1 + random_below(std::min(most, 2 * mib))};
    WorkItem work = item(Op::write_imm, *local, remote, {&slice, 1, 0, slice.length});
    work.immediate = 1000000007u * i;
    work.sequence = i + (1ull << 40);
    ASSERT_TRUE(carry_out(channel, std::span(&work, 1)));
    ASSERT_EQ(target.events.immediates.size(), i + 1);
    EXPECT_EQ(target.events.immediates.back().value, work.immediate);
    EXPECT_EQ(target.events.immediates.back().sequence, work.sequence);
    EXPECT_EQ(target.events.immediates.back().session, session);
  }
  EXPECT_EQ(seen, 50u);
}

TEST_P(ContractTest, AWriteThatIsRefusedNotifiesNobody) {
  if (!GetParam().target_checks) GTEST_SKIP() << "the target's CPU takes no part";
  const auto local = initiator.add_region("local", mib);
  const auto served = target.add_region("served", mib, Access::read);
  const RemoteRegion remote = target.remote_view(*served);
  const ChannelId channel = open_channel();
  ASSERT_NE(channel, 0u) << open_error.to_string();
  const Slice slice{0, 0, 1000};
  const WorkItem work = item(Op::write_imm, *local, remote, {&slice, 1, 0, 1000});
  EXPECT_EQ(carry_out(channel, std::span(&work, 1)), Errc::access_denied);
  EXPECT_EQ(target.events.offers, 0u);
}

TEST_P(ContractTest, PureImmediatesKeepTheirOrder) {
  const ChannelId channel = open_channel();
  ASSERT_NE(channel, 0u) << open_error.to_string();
  std::vector<WorkItem> items;
  for (std::uint32_t i = 0; i < 500; ++i) items.push_back(immediate_item(i, i));
  ASSERT_TRUE(carry_out(channel, items));
  ASSERT_EQ(target.events.immediates.size(), 500u);
  for (std::uint32_t i = 0; i < 500; ++i) EXPECT_EQ(target.events.immediates[i].value, i);
}

TEST_P(ContractTest, MessagesKeepTheirOrderAndTheirBytes) {
  const ChannelId channel = open_channel();
  ASSERT_NE(channel, 0u) << open_error.to_string();
  std::vector<std::vector<std::byte>> sent;
  std::vector<WorkItem> items;
  for (std::size_t i = 0; i < 400; ++i) {
    const std::size_t size = i == 0 ? 0 : i == 1 ? max_message_bytes : random_below(i % 10 == 0 ? 65537 : 200);
    sent.emplace_back(size);
    for (std::byte& byte : sent.back()) byte = static_cast<std::byte>(random());
  }
  for (std::size_t i = 0; i < sent.size(); ++i) items.push_back(message_item(sent[i], 77 + i));
  ASSERT_TRUE(carry_out(channel, items));
  ASSERT_EQ(target.events.messages.size(), sent.size());
  for (std::size_t i = 0; i < sent.size(); ++i) {
    EXPECT_EQ(target.events.messages[i].bytes, sent[i]) << i;
    EXPECT_EQ(target.events.messages[i].sequence, 77 + i);
    EXPECT_EQ(target.events.messages[i].session, session);
  }
}

TEST_P(ContractTest, WhatFindsNoRoomIsOfferedAgainAndHoldsUpNothingElse) {
  const auto local = initiator.add_region("local", mib);
  const auto served = target.add_region("served", mib);
  const RemoteRegion remote = target.remote_view(*served);
  const ChannelId channel = open_channel();
  ASSERT_NE(channel, 0u) << open_error.to_string();
  target.events.take_notifications = target.events.take_messages = false;
  std::vector<std::vector<std::byte>> texts;
  for (int i = 0; i < 5; ++i) texts.emplace_back(100 + i, static_cast<std::byte>(i));
  std::vector<WorkItem> stuck;
  for (std::uint32_t i = 0; i < 5; ++i) {
    stuck.push_back(message_item(texts[i], 2 * i));
    stuck.push_back(immediate_item(i, 2 * i + 1));
  }
  ASSERT_EQ(initiator.port->post(channel, stuck), stuck.size());
  ASSERT_TRUE(step_until([&] { return target.events.offers >= 20; })) << "offered again and again";
  EXPECT_LE(target.port->next_wakeup(), Clock::now() + 2ms) << "the port must ask to be polled";

  fill_random(*served);
  const Slice slice{0, 0, mib};
  ASSERT_TRUE(transfer(channel, Op::read, *local, remote, {&slice, 1})) << "others must go on";
  for (const WorkItem& work : stuck) EXPECT_FALSE(initiator.completions.contains(work.cookie));

  target.events.take_notifications = true;
  ASSERT_TRUE(step_until([&] { return target.events.immediates.size() == 5; })) << "one kind must not hold the other";
  EXPECT_TRUE(target.events.messages.empty());
  target.events.take_messages = true;
  ASSERT_TRUE(step_until([&] { return is_complete(stuck); }));
  EXPECT_TRUE(first_error(stuck));
  ASSERT_EQ(target.events.messages.size(), 5u);
  for (std::uint32_t i = 0; i < 5; ++i) {
    EXPECT_EQ(target.events.messages[i].bytes, texts[i]);
    EXPECT_EQ(target.events.immediates[i].value, i);
  }
  step_for(5ms);
  EXPECT_EQ(target.events.messages.size(), 5u) << "each exactly once";
  EXPECT_EQ(target.port->next_wakeup(), TimePoint::max());
}

// ---- the end of items

// Items over areas of their own. The moment one completes, its areas are overwritten; at the end
// nothing but that may be in them.
class Watch {
 public:
  Watch(std::shared_ptr<const RegionRecord> local, std::shared_ptr<const RegionRecord> served, std::uint64_t area)
      : local_(std::move(local)), served_(std::move(served)), area_(area) {}

  void begin() {
    std::memset(local_->data, 0x55, local_->size);
    std::memset(served_->data, 0x66, served_->size);
    place_.clear();
    reads_.clear();
  }
  void add(std::uint64_t cookie, Op op, std::size_t place) {
    place_[cookie] = place;
    if (op == Op::read) reads_[cookie] = true;
  }
  /// An item that was not taken.
  void forget(std::uint64_t cookie) { place_.erase(cookie); }
  void completed(std::uint64_t cookie) const {
    const auto place = place_.find(cookie);
    if (place == place_.end()) return;
    std::memset(local_->data + place->second * area_, static_cast<int>(poison), area_);
    if (!reads_.contains(cookie)) std::memset(served_->data + place->second * area_, static_cast<int>(settled), area_);
  }
  void expect_quiet() const {
    for (const auto& [cookie, place] : place_) {
      EXPECT_TRUE(holds_only(std::span(local_->data + place * area_, area_), poison)) << "local memory moved";
      const std::byte served = reads_.contains(cookie) ? std::byte{0x66} : settled;
      EXPECT_TRUE(holds_only(std::span(served_->data + place * area_, area_), served)) << "remote memory moved";
    }
  }

 private:
  std::shared_ptr<const RegionRecord> local_;
  std::shared_ptr<const RegionRecord> served_;
  std::uint64_t area_;
  std::map<std::uint64_t, std::size_t> place_;
  std::map<std::uint64_t, bool> reads_;
};

class QuiescenceTest : public ContractTest {
 protected:
  static constexpr std::uint64_t area = 256 << 10;
  static constexpr std::size_t areas = 24;

  QuiescenceTest()
      : local(initiator.add_region("local", area * areas)),
        served(target.add_region("served", area * areas)),
        remote(target.remote_view(*served)),
        watch(local, served, area) {
    initiator.when_complete = [this](std::uint64_t cookie, const Status& status) {
      EXPECT_TRUE(status || status == Errc::cancelled || status == Errc::channel_error) << status.to_string();
      watch.completed(cookie);
    };
  }

  void prepare(std::size_t count) {
    slices.clear();
    items.clear();
    watch.begin();
    slices.reserve(count * 3);
    for (std::size_t place = 0; place < count; ++place) {
      const std::uint64_t start = place * area;
      const std::size_t first = slices.size();
      slices.push_back({start, start + 10, 1 + random_below(1000)});
      slices.push_back({start + 2000, start + 3000, 1 + random_below(100000)});
      slices.push_back({start + 150000, start + 150000, 1 + random_below(100000)});
      const Op op = std::array{Op::read, Op::write, Op::write_imm}[random_below(3)];
      items.push_back(item(op, *local, remote, whole(std::span(slices).subspan(first, 3))));
      watch.add(items.back().cookie, op, place);
    }
  }
  /// Polls one side or the other, so that they are found in every state.
  void step_unevenly() {
    for (std::uint64_t steps = random_below(12); steps > 0; --steps)
      random_below(3) == 0 ? target.poll() : initiator.poll();
  }

  std::shared_ptr<const RegionRecord> local;
  std::shared_ptr<const RegionRecord> served;
  RemoteRegion remote;
  Watch watch;
  std::vector<Slice> slices;
  std::vector<WorkItem> items;
};

TEST_P(QuiescenceTest, NothingMovesAfterACancelledItemsCompletion) {
  const ChannelId channel = open_channel();
  ASSERT_NE(channel, 0u) << open_error.to_string();
  std::size_t cancelled = 0;
  for (int round = 0; round < 60; ++round) {
    prepare(1 + random_below(areas));
    const std::size_t posted = initiator.port->post(channel, items);
    step_unevenly();
    std::vector<WorkItem> in_flight(items.begin(), items.begin() + posted);
    std::ranges::shuffle(in_flight, random);
    for (const WorkItem& work : in_flight) initiator.port->cancel(channel, work.cookie);
    initiator.port->cancel(channel, in_flight.front().cookie);  // twice does no harm
    ASSERT_TRUE(step_until([&] { return is_complete(in_flight); }));
    for (const WorkItem& work : in_flight) cancelled += initiator.completions.at(work.cookie) == Errc::cancelled;
    // What was not taken still runs, over the remains of what was cancelled.
    ASSERT_TRUE(carry_out(channel, std::span(items).subspan(posted)));
    ASSERT_TRUE(step_until([&] { return initiator.port->progress() == Progress::idle; }));
    step(20);
    watch.expect_quiet();
  }
  if (GetParam().cancels) {
    EXPECT_GT(cancelled, 0u) << "the test must have met items under way";
  }
  const Slice slice{0, 0, area * areas};
  EXPECT_TRUE(transfer(channel, Op::read, *local, remote, {&slice, 1})) << "the channel must live on";
}

TEST_P(QuiescenceTest, NothingMovesAfterAFencedItemsCompletion) {
  std::size_t ended = 0;
  for (int round = 0; round < 60; ++round) {
    const ChannelId channel = open_channel();
    ASSERT_NE(channel, 0u) << open_error.to_string();
    prepare(1 + random_below(areas));
    const std::size_t posted = initiator.port->post(channel, items);
    const std::span<const WorkItem> in_flight = std::span(items).first(posted);
    step_unevenly();
    if (round % 3 == 0) {
      for (const WorkItem& work : in_flight) initiator.port->cancel(channel, work.cookie);
    }
    const TimePoint fenced_at = Clock::now();
    initiator.port->fence(channel, {Errc::timed_out, "a test wants it"});
    EXPECT_EQ(initiator.port->post(channel, in_flight), 0u) << "the channel is gone";
    for (const WorkItem& work : std::span(items).subspan(posted)) watch.forget(work.cookie);
    ASSERT_TRUE(step_until([&] { return is_complete(in_flight) && initiator.events.down.contains(channel); }));
    EXPECT_LT(Clock::now() - fenced_at, initiator.context.fence_limit + 500ms);
    EXPECT_NE(initiator.events.down[channel].text().find("a test wants it"), std::string::npos);
    for (const WorkItem& work : in_flight) ended += !initiator.completions.at(work.cookie).is_ok();
    step(30);
    for (int i = 0; i < 30; ++i) target.poll();
    watch.expect_quiet();
  }
  EXPECT_GT(ended, 0u) << "the test must have met items under way";
}

TEST_P(QuiescenceTest, AFenceIsBoundedWhenTheTargetDoesNotAnswer) {
  const ChannelId channel = open_channel();
  ASSERT_NE(channel, 0u) << open_error.to_string();
  prepare(areas);
  const std::size_t posted = initiator.port->post(channel, items);
  for (int i = 0; i < 5; ++i) initiator.poll();
  initiator.port->fence(channel, {Errc::timed_out, "silence"});
  const TimePoint limit = Clock::now() + initiator.context.fence_limit + 2s;
  const std::span<const WorkItem> in_flight = std::span(items).first(posted);
  while (!is_complete(in_flight) && Clock::now() < limit) initiator.poll();
  EXPECT_TRUE(is_complete(in_flight));
  EXPECT_TRUE(initiator.events.down.contains(channel));
}

// ---- the end of channels

TEST_P(ContractTest, AChannelThatIsLostSaysWhyAndCanBeOpenedAgain) {
  const auto local = initiator.add_region("local", 8 * mib);
  const auto served = target.add_region("served", 8 * mib);
  const RemoteRegion remote = target.remote_view(*served);
  const ChannelId channel = open_channel();
  ASSERT_NE(channel, 0u) << open_error.to_string();
  const Slice slice{0, 0, std::min<std::uint64_t>(8 * mib, initiator.port->limits().item_bytes)};
  const WorkItem work = item(Op::read, *local, remote, {&slice, 1, 0, slice.length});
  target.port->drop_session(session);
  initiator.port->post(channel, std::span(&work, 1));
  ASSERT_TRUE(step_until([&] { return initiator.events.down.contains(channel); }));
  const Status& why = initiator.events.down[channel];
  EXPECT_EQ(why, Errc::channel_error) << why.to_string();
  EXPECT_GT(why.text().size(), 20u) << "side, address and reason: " << why.text();
  EXPECT_EQ(initiator.port->post(channel, std::span(&work, 1)), 0u);

  const ChannelId again = open_channel();
  ASSERT_NE(again, 0u) << open_error.to_string();
  ASSERT_NE(again, channel) << "numbers are never used twice";
  EXPECT_TRUE(transfer(again, Op::read, *local, remote, {&slice, 1}));
}

TEST_P(ContractTest, DropSessionEndsThatSessionAlone) {
  Token other{};
  other.fill(std::byte{9});
  target.events.sessions[other] = session + 1;
  const ChannelId first = open_channel();
  ChannelSpec with = spec();
  with.token = other;
  const ChannelId second = open_channel(with);
  ASSERT_NE(first, 0u);
  ASSERT_NE(second, 0u);
  target.port->drop_session(session + 1);
  // Where no CPU of the target takes part, the end shows in the next item.
  const WorkItem probe = immediate_item(4, 4);
  if (!GetParam().target_checks) {
    EXPECT_EQ(carry_out(second, std::span(&probe, 1)), Errc::channel_error);
  }
  ASSERT_TRUE(step_until([&] { return initiator.events.down.contains(second); }));
  step_for(10ms);
  EXPECT_FALSE(initiator.events.down.contains(first));
  const WorkItem work = immediate_item(5, 5);
  EXPECT_TRUE(carry_out(first, std::span(&work, 1)));
}

TEST_P(ContractTest, AnotherLifeOfTheTargetIsStale) {
  ChannelSpec with = spec();
  with.target_incarnation ^= 1;
  EXPECT_EQ(open_channel(with), 0u);
  EXPECT_EQ(open_error, Errc::stale_peer) << open_error.to_string();
}

TEST_P(ContractTest, AnUnknownTokenIsDenied) {
  ChannelSpec with = spec();
  with.token[3] = std::byte{99};
  EXPECT_EQ(open_channel(with), 0u);
  EXPECT_EQ(open_error, Errc::access_denied) << open_error.to_string();
}

TEST_P(ContractTest, ANonsenseAddressIsRefused) {
  ChannelSpec with = spec();
  with.address = "!nonsense!";
  EXPECT_EQ(open_channel(with), 0u);
  EXPECT_FALSE(open_error.is_ok());
  EXPECT_FALSE(open_error.text().empty());
}

TEST_P(ContractTest, ATargetThatIsGoneIsUnreachable) {
  const ChannelSpec with = spec(500ms);
  target.port.reset();
  EXPECT_EQ(open_channel(with), 0u);
  EXPECT_FALSE(open_error.is_ok());
}

TEST_P(ContractTest, OpeningGivesUpInTime) {
  const TimePoint start = Clock::now();
  const Result<ChannelId> opened = initiator.port->open(spec(100ms));  // the target is not polled at all
  if (!opened) return;
  while (initiator.events.down.empty() && initiator.events.up.empty() && Clock::now() < start + 5s) initiator.poll();
  if (!initiator.events.up.empty()) return;  // a transport may need nothing of the target
  ASSERT_FALSE(initiator.events.down.empty());
  EXPECT_FALSE(initiator.events.down.begin()->second.is_ok());
}

TEST_P(ContractTest, AFenceWhileConnectingEndsTheChannel) {
  const Result<ChannelId> opened = initiator.port->open(spec());
  ASSERT_TRUE(opened);
  initiator.port->fence(*opened, {Errc::cancelled, "changed my mind"});
  ASSERT_TRUE(step_until([&] { return initiator.events.down.contains(*opened); }));
  EXPECT_TRUE(initiator.events.up.empty());
  EXPECT_NE(open_channel(), 0u) << open_error.to_string();
}

// Between fork() and exec(), or for ever, a child has copies of every descriptor: closing one here does
// not close it there.
TEST_P(ContractTest, AForkedChildThatHoldsTheDescriptorsDisturbsNothing) {
  const auto local = initiator.add_region("local", mib);
  const auto served = target.add_region("served", mib);
  const RemoteRegion remote = target.remote_view(*served);
  const Slice slice{0, 0, 300000};
  for (int round = 0; round < 3; ++round) {
    const ChannelId by_initiator = open_channel();
    const ChannelId by_target = open_channel();
    ASSERT_NE(by_initiator, 0u) << open_error.to_string();
    ASSERT_NE(by_target, 0u) << open_error.to_string();
    EXPECT_TRUE(transfer(by_initiator, Op::write, *local, remote, {&slice, 1}));
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::pause();
      ::_exit(0);
    }
    initiator.port->fence(by_initiator, {Errc::cancelled, "changed my mind"});
    EXPECT_TRUE(step_until([&] { return initiator.events.down.contains(by_initiator); }));
    target.port->drop_session(session);
    const WorkItem probe = immediate_item(1, 1);
    if (!GetParam().target_checks) initiator.port->post(by_target, std::span(&probe, 1));
    EXPECT_TRUE(step_until([&] { return initiator.events.down.contains(by_target); }));
    step_for(20ms);
    const ChannelId again = open_channel();
    EXPECT_NE(again, 0u) << open_error.to_string();
    if (again != 0) {
      EXPECT_TRUE(transfer(again, Op::read, *local, remote, {&slice, 1}));
    }
    ::kill(child, SIGKILL);
    EXPECT_EQ(::waitpid(child, nullptr, 0), child);
    step_for(20ms);
  }
}

// ---- regions that go

TEST_P(ContractTest, AReleasedRegionIsQuiet) {
  const auto local = initiator.add_region("local", 4 * mib);
  std::memset(local->data, 0x77, local->size);
  for (const bool force : {false, true}) {
    for (int round = 0; round < 6; ++round) {
      const auto served = target.add_region("served " + std::to_string(2 * round + force), 4 * mib);
      const RemoteRegion remote = target.remote_view(*served);
      const ChannelId channel = open_channel();
      ASSERT_NE(channel, 0u) << open_error.to_string();
      const std::uint64_t length = std::min(initiator.port->limits().item_bytes, mib / 4);
      std::vector<Slice> slices;
      for (std::uint64_t i = 0; i < 16; ++i) slices.push_back({i * length, i * length, length});
      std::vector<WorkItem> items;
      for (std::size_t i = 0; i < slices.size(); ++i) {
        items.push_back(item(i % 2 == 0 ? Op::write : Op::read, *local, remote, {&slices[i], 1, 0, length}));
      }
      items.resize(initiator.port->post(channel, items));
      for (int i = 0; i < round; ++i) step(1);
      ASSERT_TRUE(target.regions.retire(served->key));
      if (force) {
        ASSERT_TRUE(target.port->release_region(served->key, true));
      } else {
        ASSERT_TRUE(step_until([&] { return target.port->release_region(served->key, false); }));
      }
      target.unregister(*served);
      std::memset(served->data, 0x33, served->size);
      ASSERT_TRUE(step_until([&] { return is_complete(items); }));
      step(20);
      EXPECT_TRUE(holds_only(bytes_of(*served), std::byte{0x33})) << "written after its release";
      initiator.port->fence(channel, {Errc::cancelled, "next round"});
    }
  }
}

// ---- destruction

TEST_P(QuiescenceTest, DestroyingTheInitiatorsPortStopsItsItems) {
  for (int round = 0; round < 10; ++round) {
    const ChannelId channel = open_channel();
    ASSERT_NE(channel, 0u) << open_error.to_string();
    prepare(areas);
    initiator.port->post(channel, items);
    step_unevenly();
    initiator.port.reset();
    std::memset(local->data, static_cast<int>(poison), local->size);
    for (int i = 0; i < 200; ++i) target.poll();
    EXPECT_TRUE(holds_only(bytes_of(*local), poison));
    EXPECT_EQ(std::ranges::count(bytes_of(*served), poison), 0) << "sent after the end";
    initiator.open_port();
    initiator.events.up.clear();
    initiator.events.down.clear();
  }
}

TEST_P(QuiescenceTest, DestroyingTheTargetsPortEndsTheItemsOfItsPeers) {
  const ChannelId channel = open_channel();
  ASSERT_NE(channel, 0u) << open_error.to_string();
  prepare(areas);
  const std::size_t posted = initiator.port->post(channel, items);
  step(1);
  target.port.reset();
  ASSERT_TRUE(step_until([&] { return is_complete(std::span(items).first(posted)); }));
  const WorkItem probe = immediate_item(4, 4);
  if (!GetParam().target_checks) initiator.port->post(channel, std::span(&probe, 1));
  ASSERT_TRUE(step_until([&] { return initiator.events.down.contains(channel); }));
  EXPECT_EQ(initiator.events.down[channel], Errc::channel_error);
}

std::shared_ptr<Transport> small_tcp() {
  TcpConfig config;
  config.sockets = 2;
  return make_tcp_transport(config);
}

#if KVFERRY_HAS_VERBS
std::shared_ptr<Transport> scripted_verbs(VerbsConfig config, NicDevice device) {
  // One network for all tests of a process: devices outlive the transports on them.
  static std::vector<std::unique_ptr<ScriptedNic>> networks;
  static std::map<std::string, ScriptedNic*> by_name;
  ScriptedNic*& nic = by_name[device.name];
  if (nic == nullptr) {
    networks.push_back(std::make_unique<ScriptedNic>(std::vector{device}));
    nic = networks.back().get();
  }
  auto transport = make_verbs_transport(config, *nic);
  if (!transport) throw StatusError(transport.status());
  return *transport;
}

std::shared_ptr<Transport> roomy_verbs() { return scripted_verbs({}, {.name = "roomy"}); }

/// The same, connected through a scripted librdmacm.
std::shared_ptr<Transport> called_verbs() {
  VerbsConfig config;
  config.connect = VerbsConnect::rdmacm;
  return scripted_verbs(config, {.name = "called"});
}

/// Sixteen requests in flight, short messages, small registrations: everything has to be cut.
std::shared_ptr<Transport> narrow_verbs() {
  VerbsConfig config;
  config.queue_pairs = 1;
  config.queue_depth = 16;
  NicDevice device{.name = "narrow"};
  device.ports[0].max_message = 64 << 10;
  device.max_sge = 2;
  device.max_inline = 0;
  device.max_mr_bytes = 1 << 30;
  return scripted_verbs(config, device);
}
#endif

// Each transport adds itself here.
const std::vector<ContractParam> transports_under_test {
  {"tcp", small_tcp}, {"shm", [] { return make_shm_transport({}); }},
      {"shm_foreign", [] { return make_shm_transport({}, shm::Options{.map_regions = false}); }},
#if KVFERRY_HAS_VERBS
      {"verbs", roomy_verbs, {}, false, false}, {"verbs_narrow", narrow_verbs, {}, false},
      {"verbs_rdmacm", called_verbs, {}, false, false},
#endif
};

#if KVFERRY_HAS_VERBS
std::shared_ptr<Transport> verbs_on(const std::string& device, VerbsConnect connect) {
  VerbsConfig config;
  config.connect = connect;
  config.devices = {device};
  auto transport = make_verbs_transport(config);
  if (!transport) throw StatusError(transport.status());
  return *transport;
}

/// The two RDMA devices that KVFERRY_TEST_RDMA names, such as "rxe0,rxe1" ("mlx5_0,mlx5_0" is one with itself).
std::vector<ContractParam> real_devices() {
  const char* given = std::getenv("KVFERRY_TEST_RDMA");
  const std::string names = given != nullptr ? given : "";
  const std::size_t comma = names.find(',');
  if (comma == std::string::npos) return {};
  const std::string first = names.substr(0, comma);
  const std::string second = names.substr(comma + 1);
  const auto connected = [&](std::string name, VerbsConnect connect) {
    return ContractParam{std::move(name),
                         [first, connect] { return verbs_on(first, connect); },
                         [second, connect] { return verbs_on(second, connect); },
                         false,
                         false,
                         true};
  };
  return {connected("rdma", VerbsConnect::bootstrap), connected("rdmacm", VerbsConnect::rdmacm)};
}
#endif

std::string name_of(const testing::TestParamInfo<ContractParam>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Transports, ContractTest, testing::ValuesIn(transports_under_test), name_of);
INSTANTIATE_TEST_SUITE_P(Transports, QuiescenceTest, testing::ValuesIn(transports_under_test), name_of);

#if KVFERRY_HAS_VERBS
INSTANTIATE_TEST_SUITE_P(Devices, ContractTest, testing::ValuesIn(real_devices()), name_of);
INSTANTIATE_TEST_SUITE_P(Devices, QuiescenceTest, testing::ValuesIn(real_devices()), name_of);
#endif

}  // namespace
}  // namespace kvferry::test
