// Many callers, one connection; and what a connection costs while nobody uses it.
#include <barrier>
#include <set>
#include <thread>

#include "tests/e2e/target.hpp"

namespace kvferry::test {
namespace {

TEST(Connect, ManyThreadsAtOnceShareOneConnection) {
  constexpr int threads = 64;
  Engine target = start(config_of("target"));
  EngineConfig config = config_of("initiator");
  config.rails = 2;
  Engine engine = start(config);
  std::vector<Peer> peers(threads);
  std::vector<Status> outcomes(threads);
  std::barrier together(threads);
  std::vector<std::thread> callers;
  for (int i = 0; i < threads; ++i)
    callers.emplace_back([&, i] {
      together.arrive_and_wait();
      auto peer = engine.connect(target.address());
      if (peer)
        peers[i] = *peer;
      else
        outcomes[i] = peer.status();
    });
  for (auto& caller : callers) caller.join();
  for (int i = 0; i < threads; ++i) {
    ASSERT_TRUE(outcomes[i].is_ok()) << outcomes[i].to_string();
    EXPECT_EQ(peers[i], peers[0]);
  }
  EXPECT_EQ(engine.peers().size(), 1u);
  EXPECT_EQ(target.peers().size(), 1u);
  EXPECT_EQ(counter(engine, "channels_opened"), 2u * 2) << "two rails of each of two transports";
  EXPECT_EQ(counter(engine, "channels_lost"), 0u);
}

TEST(Connect, BothSidesAtOnceEachGetTheirOwn) {
  Engine left = start(config_of("left"));
  Engine right = start(config_of("right"));
  std::vector<std::thread> callers;
  std::atomic<int> failures{0};
  for (int i = 0; i < 16; ++i)
    callers.emplace_back([&, i] {
      failures += i % 2 == 0 ? !left.connect(right.address()).is_ok() : !right.connect(left.address()).is_ok();
    });
  for (auto& caller : callers) caller.join();
  EXPECT_EQ(failures, 0);
  EXPECT_EQ(left.peers().size(), 1u);
  EXPECT_EQ(right.peers().size(), 1u);
  EXPECT_EQ(counter(left, "channels_opened"), 2u);
  EXPECT_EQ(counter(right, "channels_opened"), 2u);
}

TEST(Connect, ConnectingOverAndOverLeavesNothingBehind) {
  Engine target = start(config_of("target"));
  const auto once = [&] {
    Engine engine = start(config_of("initiator"));
    ASSERT_TRUE(engine.connect(target.address()));
  };
  for (int i = 0; i < 3; ++i) once();
  ASSERT_TRUE(eventually(slow(5s), [&] { return target.peers().empty(); }));
  const int before = own_open_descriptors();
  for (int i = 0; i < 20; ++i) once();
  EXPECT_TRUE(eventually(slow(5s), [&] { return target.peers().empty(); })) << target.peers().size();
  EXPECT_TRUE(eventually(slow(5s), [&] { return own_open_descriptors() <= before; }))
      << before << " descriptors before, " << own_open_descriptors() << " now";
}

TEST(Idle, AnEngineWithAConnectedPeerUsesUnderOneHundredthOfACore) {
  constexpr auto watched = 3s;
  Target other;
  Engine engine = start(config_of("here"));
  ASSERT_TRUE(engine.connect(other.address));
  ASSERT_EQ(other.ask("connect " + engine.address()), "ok");
  std::this_thread::sleep_for(200ms);
  const std::uint64_t before = other.ask_number("cpu");
  std::this_thread::sleep_for(watched);
  const std::uint64_t used = other.ask_number("cpu") - before;
  const auto allowed = std::chrono::microseconds(slow(watched)).count() / 100;
  EXPECT_LT(used, static_cast<std::uint64_t>(allowed)) << "microseconds of computing in 3 s";
}

}  // namespace
}  // namespace kvferry::test
