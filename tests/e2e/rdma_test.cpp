// Two processes on real RDMA devices, and what happens to them: scripts/test --rdma runs these on Soft-RoCE.
// KVFERRY_TEST_RDMA names two devices, such as "rxe0,rxe1"; without it everything here is skipped.
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include <fmt/format.h>

#include "tests/e2e/target.hpp"

namespace kvferry::test {
namespace {

/// The device at this place of KVFERRY_TEST_RDMA; empty when there is none.
std::string device(std::size_t place) {
  const char* given = std::getenv("KVFERRY_TEST_RDMA");
  const std::string names = given != nullptr ? given : "";
  const std::size_t comma = names.find(',');
  if (comma == std::string::npos) return {};
  return place == 0 ? names.substr(0, comma) : names.substr(comma + 1);
}

std::vector<std::string> target_variables(const std::string& connect, const std::string& transports = "verbs") {
  return {"KVFERRY_TRANSPORTS=" + transports, "KVFERRY_NAME=target", "KVFERRY_VERBS_DEVICES=" + device(0),
          "KVFERRY_VERBS_CONNECT=" + connect};
}

EngineConfig initiator_config(VerbsConnect connect = VerbsConnect::bootstrap) {
  EngineConfig made;
  made.name = "initiator";
  made.transports = {"verbs"};
  made.verbs.devices = {device(1)};
  made.verbs.connect = connect;
  return made;
}

/// Fails unless the read brings what the target has under this seed.
void expect_good_read(Engine& engine, const Peer& peer, const Region& ours, std::uint64_t seed) {
  std::memset(ours.data(), 0, ours.size());
  const Slice all{0, 0, ours.size()};
  const Status status = engine.read(peer, ours, "kv", {&all, 1}).wait();
  ASSERT_TRUE(status) << status.to_string();
  EXPECT_EQ(wrong_bytes(ours.bytes(), seed), 0u);
}

constexpr const char* no_devices = "KVFERRY_TEST_RDMA names no two RDMA devices, such as rxe0,rxe1";

// Before the others: librdmacm holds a device that it has seen until the process ends.
TEST(RdmaRemoval, ADeviceThatIsRemovedUnderLoadLosesNothingAndServesAgainWhenItIsBack) {
  if (device(0).empty()) GTEST_SKIP() << no_devices;
  const char* link = std::getenv("KVFERRY_TEST_RDMA_NETDEV");
  if (link == nullptr) GTEST_SKIP() << "KVFERRY_TEST_RDMA_NETDEV does not name the second device's interface (root)";
  const std::string remove = "rdma link delete " + device(1);
  const std::string add = fmt::format("rdma link add {} type rxe netdev {}", device(1), link);
  constexpr std::uint64_t bytes = mib;
  Target target(target_variables("bootstrap", "verbs,tcp"));
  ASSERT_EQ(target.ask(fmt::format("allocate kv {}", bytes)), "ok");
  ASSERT_EQ(target.ask("fill kv 5"), "ok");
  std::atomic<int> removed{-1};
  std::jthread remover;
  {
    EngineConfig both = initiator_config();
    both.transports.emplace_back("tcp");
    Engine engine = start(both);
    const Region ours = engine.allocate("local", bytes).value();
    const Peer peer = engine.connect(target.address).value();
    expect_good_read(engine, peer, ours, 5);
    // The kernel waits with it until the engine lets go of the device.
    remover = std::jthread([&] { removed = std::system(remove.c_str()); });
    const TimePoint until = Clock::now() + 3s;
    while (Clock::now() < until && !::testing::Test::HasFatalFailure()) expect_good_read(engine, peer, ours, 5);
    ASSERT_FALSE(::testing::Test::HasFatalFailure()) << "every transfer goes on over TCP";
  }
  remover.join();
  ASSERT_EQ(removed, 0) << remove;
  ASSERT_EQ(std::system(add.c_str()), 0) << add;
  // Its address appears a moment after the device. This engine has nothing but RDMA.
  auto again = Engine::start(initiator_config());
  ASSERT_TRUE(eventually(slow(10s), [&] {
    if (!again) again = Engine::start(initiator_config());
    return again.is_ok();
  })) << again.status().to_string();
  const Region ours = again->allocate("local", bytes).value();
  const Peer peer = again->connect(target.address).value();
  expect_good_read(*again, peer, ours, 5);
}

class RdmaTest : public ::testing::TestWithParam<VerbsConnect> {
 protected:
  void SetUp() override {
    if (device(0).empty()) GTEST_SKIP() << no_devices;
  }
  static std::vector<std::string> variables() { return target_variables(std::string(to_string(GetParam()))); }
  static EngineConfig config() { return initiator_config(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(, RdmaTest, ::testing::Values(VerbsConnect::bootstrap, VerbsConnect::rdmacm),
                         [](const auto& info) { return std::string(to_string(info.param)); });

TEST_P(RdmaTest, ATargetThatIsKilledInAReadEndsItAndLocalMemoryIsQuiet) {
  constexpr std::uint64_t bytes = 64 * mib;
  Target target(variables());
  ASSERT_EQ(target.ask("allocate kv " + std::to_string(bytes)), "ok");
  ASSERT_EQ(target.ask("fill kv 1"), "ok");
  Engine engine = start(config());
  const Region ours = engine.allocate("local", bytes).value();
  const Peer peer = engine.connect(target.address).value();
  const Slice all{0, 0, bytes};
  const Transfer transfer = engine.read(peer, ours, "kv", {&all, 1});
  const std::atomic_ref<std::byte> early(ours.data()[bytes / 64]);
  while (early.load(std::memory_order_relaxed) == std::byte{0} && !transfer.done()) std::this_thread::sleep_for(1ms);
  ASSERT_FALSE(transfer.done()) << "it was to be killed in the middle: " << transfer.status().to_string();
  target.process.signal(SIGKILL);
  const TimePoint killed = Clock::now();
  ASSERT_TRUE(transfer.wait_for(slow(10s)));
  EXPECT_LT(Clock::now() - killed, slow(5s));
  EXPECT_EQ(transfer.status().code(), Errc::peer_lost) << transfer.status().to_string();
  std::memset(ours.data(), 0xee, ours.size());
  const Snapshot after(ours.bytes());
  std::this_thread::sleep_for(500ms);
  EXPECT_EQ(after.changed_bytes(), 0u);
}

TEST_P(RdmaTest, ADepthOf16CarriesTenThousandRequests) {
  constexpr std::size_t count = 10'000;
  constexpr std::uint64_t length = 256;
  auto with_depth = variables();
  with_depth.emplace_back("KVFERRY_VERBS_QUEUE_DEPTH=16");
  Target target(with_depth);
  ASSERT_EQ(target.ask(fmt::format("allocate kv {}", count * length)), "ok");
  ASSERT_EQ(target.ask("fill kv 3"), "ok");
  EngineConfig narrow = config();
  narrow.verbs.queue_depth = 16;
  Engine engine = start(narrow);
  const Region ours = engine.allocate("local", count * length).value();
  const Peer peer = engine.connect(target.address).value();
  const std::vector<Slice> there = shuffled_slices(count, length, 7);
  const Status read = engine.read(peer, ours, "kv", there).wait();
  ASSERT_TRUE(read) << read.to_string();
  // Back by the same slices: right only if both directions were.
  ASSERT_EQ(target.ask("fill kv 4"), "ok");
  const Status write = engine.write(peer, ours, "kv", there).wait();
  ASSERT_TRUE(write) << write.to_string();
  EXPECT_EQ(target.ask("wrong kv 3"), "0");
}

}  // namespace
}  // namespace kvferry::test
