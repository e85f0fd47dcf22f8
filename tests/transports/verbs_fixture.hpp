// Two sides of the verbs transport on scripted devices, stepped by one thread.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvferry/transports/verbs/verbs_transport.hpp>

#include "contract_fixture.hpp"
#include "tests/support/scripted_nic.hpp"

namespace kvferry::test {

inline constexpr std::uint64_t kib = 1 << 10;
inline constexpr std::uint64_t mib = 1 << 20;

inline NicDevice device(std::string name, ibv_port_state state = IBV_PORT_ACTIVE) {
  NicDevice made{.name = std::move(name)};
  made.ports[0].state = state;
  return made;
}

/// Two sides on one network of devices that the test can disturb.
class VerbsTest : public testing::Test {
 protected:
  static constexpr std::uint64_t life = 0x77;
  static constexpr SessionId session = 4;

  void start(std::vector<NicDevice> devices, VerbsConfig config = {}) {
    nic = std::make_unique<ScriptedNic>(std::move(devices));
    start_sides(config, config);
  }
  /// With a network that is there already.
  void start_sides(VerbsConfig targets, VerbsConfig initiators) {
    target = std::make_unique<Side>(*make_verbs_transport(targets, *nic), life);
    initiator = std::make_unique<Side>(*make_verbs_transport(initiators, *nic), 0x99);
    token.fill(std::byte{5});
    target->events.sessions[token] = session;
  }
  void TearDown() override {
    initiator.reset();
    target.reset();
    if (!nic) return;
    EXPECT_EQ(nic->broken_rules(), std::vector<std::string>{});
    const auto left = nic->counts();
    EXPECT_EQ(
        left.pairs + left.regions + left.queues + left.receive_queues + left.channels + left.contexts + left.domains,
        0u)
        << "something was left behind";
    EXPECT_EQ(nic->cm().broken_rules(), std::vector<std::string>{});
    EXPECT_EQ(nic->cm().counts().ids + nic->cm().counts().channels, 0u);
  }

  void step() {
    initiator->poll();
    if (target) target->poll();
    for (auto& [channel, request] : std::exchange(initiator->events.requests, {})) {
      if (mute) continue;
      Result<std::string> answer(Status(Errc::unreachable, "the peer is gone"));
      if (target && target->port) answer = target->port->serve(request);
      initiator->port->on_answer(channel, answer);
    }
  }
  template <class Condition>
  bool step_until(Condition&& done) {
    const TimePoint limit = Clock::now() + std::chrono::seconds(20);
    while (!done()) {
      if (Clock::now() > limit) return false;
      step();
    }
    return true;
  }
  ChannelSpec spec(Duration limit = std::chrono::seconds(5)) const {
    ChannelSpec made;
    made.address = target->port->address();
    made.token = token;
    made.target_incarnation = life;
    made.give_up = Clock::now() + limit;
    return made;
  }
  ChannelId open(std::uint32_t path = 0) {
    ChannelSpec wanted = spec();
    wanted.path = path;
    const auto channel = initiator->port->open(wanted);
    EXPECT_TRUE(channel) << channel.status().to_string();
    if (!channel) return 0;
    EXPECT_TRUE(step_until([&] { return std::ranges::count(initiator->events.up, *channel) == 1; }));
    return *channel;
  }

  WorkItem item(Op op, std::span<const Slice> slices) {
    WorkItem made;
    made.op = op;
    made.cookie = ++last_cookie;
    made.local = local.get();
    made.remote = &remote;
    made.sequence = last_cookie;
    std::uint64_t bytes = 0;
    for (const Slice& slice : slices) bytes += slice.length;
    made.slices = {slices.data(), static_cast<std::uint32_t>(slices.size()), 0, bytes};
    return made;
  }
  /// Regions on both sides, filled with different things.
  void regions(std::uint64_t bytes) {
    local = initiator->add_region("local", bytes);
    served = target->add_region("served", bytes);
    remote = target->remote_view(*served);
    for (std::uint64_t i = 0; i < bytes; ++i) served->data[i] = pattern(i);
  }
  static std::byte pattern(std::uint64_t at) { return static_cast<std::byte>(at * 31 + (at >> 8) * 7 + 3); }
  /// Blocks in another order on either side, none of whose neighbours touch.
  static std::vector<Slice> scattered(std::size_t count, std::uint64_t length) {
    std::vector<Slice> slices;
    for (std::uint64_t i = 0; i < count; ++i) slices.push_back({(count - 1 - i) * length, i * length, length});
    return slices;
  }
  std::size_t wrong(std::span<const Slice> slices) const {
    std::size_t bytes = 0;
    for (const Slice& slice : slices)
      bytes += std::memcmp(local->data + slice.local_offset, served->data + slice.remote_offset, slice.length) != 0;
    return bytes;
  }
  Status carry_out(ChannelId channel, std::span<const WorkItem> items) {
    std::size_t posted = 0;
    const auto done = [&] {
      posted += initiator->port->post(channel, items.subspan(posted));
      return posted == items.size() && std::ranges::all_of(items, [&](const WorkItem& one) {
               return initiator->completions.contains(one.cookie);
             });
    };
    if (!step_until(done)) return {Errc::timed_out, "the items never completed"};
    for (const WorkItem& one : items)
      if (const Status& status = initiator->completions.at(one.cookie); !status) return status;
    return {};
  }

  std::unique_ptr<ScriptedNic> nic;
  std::unique_ptr<Side> target;
  std::unique_ptr<Side> initiator;
  std::shared_ptr<const RegionRecord> local;
  std::shared_ptr<const RegionRecord> served;
  RemoteRegion remote;
  Token token{};
  std::uint64_t last_cookie = 0;
  bool mute = false;  ///< requests get no answer
};

}  // namespace kvferry::test
