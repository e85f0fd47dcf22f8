// A target that dies, freezes or comes back: what its peers are told, how soon, and that nothing lands
// where it should not.
#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstring>
#include <memory>
#include <thread>

#include <sys/wait.h>

#include "tests/e2e/target.hpp"

namespace kvferry::test {
namespace {

class DeathTest : public ::testing::TestWithParam<const char*> {
 protected:
  std::vector<std::string> variables(const std::string& listen = "tcp://127.0.0.1:0") const {
    return {std::string("KVFERRY_TRANSPORTS=") + GetParam(), "KVFERRY_NAME=target", "KVFERRY_LISTEN=" + listen};
  }
};

INSTANTIATE_TEST_SUITE_P(, DeathTest, each_transport(), transport_name);

TEST_P(DeathTest, KillAtHalfOfAWriteIsNoticedWithinTwoSeconds) {
  Target target(variables());
  ASSERT_EQ(target.ask("allocate kv " + std::to_string(gib)), "ok");
  Engine engine = start(config_of("initiator", GetParam()));
  // The same memory again and again: the target's half of 1 GiB is page faults enough.
  const Region ours = engine.allocate("local", 64 * mib).value();
  std::memset(ours.data(), 0x5a, ours.size());
  const Peer peer = engine.connect(target.address).value();
  ASSERT_EQ(target.ask("die_at kv " + std::to_string(gib / 2)), "ok");

  std::vector<Slice> slices;
  for (std::uint64_t at = 0; at < gib; at += ours.size()) slices.push_back({0, at, ours.size()});
  const Transfer transfer = engine.write(peer, ours, "kv", slices);
  ASSERT_EQ(transfer.bytes(), gib);
  const auto end = target.process.wait(slow(20s));
  const TimePoint died = Clock::now();
  ASSERT_TRUE(end && WIFSIGNALED(*end) && WTERMSIG(*end) == SIGKILL) << "the write never came to its half";
  ASSERT_TRUE(transfer.wait_for(slow(2s)));
  EXPECT_LE(Clock::now() - died, slow(2s));
  EXPECT_EQ(transfer.status().code(), Errc::peer_lost) << transfer.status().to_string();
  EXPECT_NE(transfer.status().text().find("target"), std::string_view::npos) << transfer.status().text();
  EXPECT_TRUE(peer.describe().starts_with("lost")) << peer.describe();
}

TEST_P(DeathTest, KillDuringAReadLeavesLocalMemoryQuiet) {
  constexpr std::uint64_t bytes = 128 * mib;
  Target target(variables());
  ASSERT_EQ(target.ask("allocate kv " + std::to_string(bytes)), "ok");
  ASSERT_EQ(target.ask("fill kv 1"), "ok");
  Engine engine = start(config_of("initiator", GetParam()));
  const Region ours = engine.allocate("local", bytes).value();
  const Peer peer = engine.connect(target.address).value();

  const Slice all{0, 0, bytes};
  const Transfer transfer = engine.read(peer, ours, "kv", {&all, 1});
  const std::atomic_ref<std::byte> early(ours.data()[bytes / 16]);
  while (early.load(std::memory_order_relaxed) == std::byte{0} && !transfer.done()) std::this_thread::yield();
  target.process.signal(SIGKILL);
  ASSERT_TRUE(transfer.wait_for(slow(2s)));
  EXPECT_EQ(transfer.status().code(), Errc::peer_lost) << transfer.status().to_string();
  std::memset(ours.data(), 0xee, ours.size());
  std::this_thread::sleep_for(300ms);
  const auto untouched = static_cast<std::uint64_t>(std::count(ours.data(), ours.data() + bytes, std::byte{0xee}));
  EXPECT_EQ(untouched, bytes);
}

TEST_P(DeathTest, ANewLifeOnTheSamePortIsAnotherPeer) {
  auto target = std::make_unique<Target>(variables());
  const std::string address = target->address;
  ASSERT_EQ(target->ask("allocate kv 4194304"), "ok");
  EngineConfig config = config_of("initiator", GetParam());
  config.heartbeat_interval = 100ms;
  Engine engine = start(config);
  const Region ours = engine.allocate("local", 4 * mib).value();
  fill(ours.bytes(), 1);
  const Peer old_peer = engine.connect(address).value();
  const RemoteHandle old_region = engine.find_region(old_peer, "kv").value();
  const Slice slice{0, 0, 4 * mib};
  ASSERT_TRUE(engine.write(old_peer, ours, "kv", {&slice, 1}).wait());

  // Somebody writes on and on through the death and the rebirth.
  Status unexpected;
  std::jthread stubborn([&](const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      const Status by_name = engine.write(old_peer, ours, "kv", {&slice, 1}).wait();
      const Status by_handle = engine.write(old_peer, ours, old_region, {&slice, 1}).wait();
      for (const Status& status : {by_name, by_handle}) {
        const bool expected = status.is_ok() || status == Errc::peer_lost || status == Errc::stale_peer;
        if (!expected) unexpected = status;
      }
    }
  });
  std::this_thread::sleep_for(50ms);
  target->process.signal(SIGKILL);
  target->process.wait(slow(5s));
  target.reset();
  Target reborn(variables(address));
  ASSERT_EQ(reborn.address, address);
  ASSERT_NE(reborn.incarnation, old_peer.incarnation());
  ASSERT_EQ(reborn.ask("allocate kv 4194304"), "ok");

  const Peer new_peer = engine.connect(address).value();
  EXPECT_EQ(new_peer.incarnation(), reborn.incarnation);
  for (int i = 0; i < 20; ++i) {
    const TimePoint begin = Clock::now();
    const Status status = engine.write(old_peer, ours, "kv", {&slice, 1}).wait();
    EXPECT_EQ(status.code(), Errc::stale_peer) << status.to_string();
    EXPECT_LT(Clock::now() - begin, slow(200ms)) << "a stale handle is refused at once";
    std::this_thread::sleep_for(20ms);
  }
  EXPECT_EQ(engine.find_region(old_peer, "kv").status().code(), Errc::stale_peer);
  EXPECT_EQ(engine.send(old_peer, std::as_bytes(std::span("hello"))).wait().code(), Errc::stale_peer);
  stubborn.request_stop();
  stubborn.join();
  EXPECT_TRUE(unexpected) << unexpected.to_string();
  // A handle of the old life's memory means nothing in the new one.
  EXPECT_FALSE(engine.write(new_peer, ours, old_region, {&slice, 1}).wait().is_ok());
  EXPECT_EQ(reborn.ask("nonzero kv"), "0");

  const Status status = engine.write(new_peer, ours, "kv", {&slice, 1}).wait();
  EXPECT_TRUE(status) << status.to_string();
  EXPECT_EQ(reborn.ask("wrong kv 1"), "0");
  EXPECT_EQ(engine.write(old_peer, ours, "kv", {&slice, 1}).wait().code(), Errc::stale_peer);
}

TEST_P(DeathTest, ANewLifeIsNoticedWithoutConnecting) {
  auto target = std::make_unique<Target>(variables());
  const std::string address = target->address;
  ASSERT_EQ(target->ask("allocate kv 4096"), "ok");
  EngineConfig config = config_of("initiator", GetParam());
  config.heartbeat_interval = 100ms;
  Engine engine = start(config);
  const Region ours = engine.allocate("local", 4096).value();
  const Peer old_peer = engine.connect(address).value();
  target.reset();
  Target reborn(variables(address));
  const Slice slice{0, 0, 4096};
  Status status;
  EXPECT_TRUE(eventually(slow(3s), [&] {
    status = engine.write(old_peer, ours, "kv", {&slice, 1}).wait();
    return status.code() == Errc::stale_peer;
  })) << status.to_string();
  EXPECT_TRUE(old_peer.describe().starts_with("stale")) << old_peer.describe();
}

TEST_P(DeathTest, ConnectingToADeadTargetFailsWithinTheTimeout) {
  auto target = std::make_unique<Target>(variables());
  const std::string address = target->address;
  EngineConfig config = config_of("initiator", GetParam());
  config.connect_timeout = slow(500ms);
  Engine engine = start(config);
  ASSERT_TRUE(engine.connect(address));
  target.reset();
  // Right at its death, while it is suspected, and when it is known to be lost.
  for (const auto pause : {0ms, 300ms, 1000ms}) {
    std::this_thread::sleep_for(pause);
    const TimePoint begin = Clock::now();
    const auto peer = engine.connect(address);
    if (pause == 0ms && peer.is_ok()) continue;  // nobody has noticed yet
    EXPECT_EQ(peer.status().code(), Errc::unreachable) << peer.status().to_string();
    EXPECT_LT(Clock::now() - begin, slow(1s));
  }
}

TEST_P(DeathTest, AFrozenTargetIsLostWithinThePeerTimeoutAndMayComeBack) {
  constexpr auto peer_timeout = 1000ms;
  Target target(variables());
  ASSERT_EQ(target.ask("allocate kv 33554432"), "ok");
  EngineConfig config = config_of("initiator", GetParam());
  config.heartbeat_interval = 100ms;
  config.peer_timeout = peer_timeout * slowness();
  Engine engine = start(config);
  const Region ours = engine.allocate("local", 32 * mib).value();
  fill(ours.bytes(), 2);
  const Peer peer = engine.connect(target.address).value();
  const Slice slice{0, 0, 32 * mib};
  ASSERT_TRUE(engine.write(peer, ours, "kv", {&slice, 1}).wait());

  target.process.signal(SIGSTOP);
  const TimePoint frozen = Clock::now();
  Status status;
  while (status.is_ok() && Clock::now() - frozen < slow(10s))
    status = engine.write(peer, ours, "kv", {&slice, 1}).wait();
  EXPECT_EQ(status.code(), Errc::peer_lost) << status.to_string();
  // One heartbeat more until it is looked at, and a second for what is submitted right after the loss:
  // it waits that long for a sign of life.
  EXPECT_LT(Clock::now() - frozen, slow(peer_timeout + 1600ms));

  target.process.signal(SIGCONT);
  EXPECT_TRUE(eventually(slow(6s),
                         [&] {
                           status = engine.write(peer, ours, "kv", {&slice, 1}).wait();
                           return status.is_ok();
                         }))
      << "the same life has the same handle: " << status.to_string();
  EXPECT_EQ(target.ask("wrong kv 2"), "0");
}

}  // namespace
}  // namespace kvferry::test
