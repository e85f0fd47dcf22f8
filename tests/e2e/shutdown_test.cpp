// Ending an engine, on either side, at a bad moment: within a second, with every transfer ended and
// all memory quiet. What outlives it still answers.
#include <atomic>
#include <cstring>
#include <future>
#include <optional>
#include <thread>

#include "tests/e2e/engines.hpp"

namespace kvferry::test {
namespace {

constexpr std::size_t many = 1000;
constexpr std::uint64_t share = 64 * kib;

class ShutdownTest : public ::testing::TestWithParam<const char*> {
 protected:
  ShutdownTest() {
    fill(theirs_.bytes(), 1);
    fill(ours_.bytes(), 2);
  }

  /// Reads into and writes from memory of this process, through and through.
  std::vector<Transfer> begin_many() {
    std::vector<Transfer> transfers;
    for (std::size_t i = 0; i < many; ++i) {
      const Slice slice{i * share, i * share, share};
      transfers.push_back(i % 2 == 0 ? initiator_->read(*peer_, ours_, "kv", {&slice, 1})
                                     : initiator_->write(*peer_, ours_, "kv", {&slice, 1}));
    }
    return transfers;
  }

  void expect_quiet() {
    std::memset(ours_.data(), 0x11, ours_.size());
    std::memset(theirs_.data(), 0x22, theirs_.size());
    const Snapshot here(ours_.bytes());
    const Snapshot there(theirs_.bytes());
    std::this_thread::sleep_for(300ms);
    EXPECT_EQ(here.changed_bytes(), 0u);
    EXPECT_EQ(there.changed_bytes(), 0u);
  }

  /// Ends the engine within its second.
  static void end(std::optional<Engine>& engine) {
    const TimePoint begin = Clock::now();
    engine.reset();
    EXPECT_LT(Clock::now() - begin, slow(1s));
  }

  std::optional<Engine> target_ = start(config_of("target", GetParam()));
  std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>();
  std::optional<Engine> initiator_ =
      start(config_of("initiator"), {make_fault_transport(make_transport(GetParam()), plan_, GetParam())});
  std::optional<Peer> peer_ = initiator_->connect(target_->address()).value();
  Region theirs_ = target_->allocate("kv", many* share).value();
  Region ours_ = initiator_->allocate("local", many* share).value();
};

INSTANTIATE_TEST_SUITE_P(, ShutdownTest, each_transport(), transport_name);

TEST_P(ShutdownTest, EndingTheInitiatorEndsAThousandTransfers) {
  const auto transfers = begin_many();
  end(initiator_);
  for (const Transfer& transfer : transfers) {
    ASSERT_TRUE(transfer.done());
    const Errc code = transfer.status().code();
    ASSERT_TRUE(code == Errc::ok || code == Errc::shutting_down) << transfer.status().to_string();
  }
  EXPECT_EQ(transfers.back().status().code(), Errc::shutting_down);
  expect_quiet();
}

TEST_P(ShutdownTest, EndingTheInitiatorDoesNotWaitForALateTransport) {
  plan_->delay_us = std::chrono::microseconds(20s).count();
  plan_->ignore_cancel = true;
  const auto transfers = begin_many();
  std::this_thread::sleep_for(50ms);
  end(initiator_);
  for (const Transfer& transfer : transfers) {
    ASSERT_TRUE(transfer.done());
    ASSERT_EQ(transfer.status().code(), Errc::shutting_down) << transfer.status().to_string();
  }
  expect_quiet();
}

TEST_P(ShutdownTest, EndingTheTargetEndsAThousandTransfers) {
  const auto transfers = begin_many();
  end(target_);
  for (const Transfer& transfer : transfers) {
    ASSERT_TRUE(transfer.wait_for(slow(3s)));
    const Errc code = transfer.status().code();
    ASSERT_TRUE(code == Errc::ok || code == Errc::peer_lost) << transfer.status().to_string();
  }
  EXPECT_EQ(transfers.back().status().code(), Errc::peer_lost) << transfers.back().status().to_string();
  expect_quiet();
}

TEST_P(ShutdownTest, EndingBothAtOnceIsNoTroubleEither) {
  const auto transfers = begin_many();
  std::thread other([&] { end(target_); });
  end(initiator_);
  other.join();
  for (const Transfer& transfer : transfers) ASSERT_TRUE(transfer.done());
  expect_quiet();
}

TEST_P(ShutdownTest, CallersInEveryWaitAreLetGo) {
  plan_->delay_us = std::chrono::microseconds(20s).count();
  std::byte buffer[16];
  const Slice slice{0, 0, share};
  const Transfer reading = initiator_->read(*peer_, ours_, "kv", {&slice, 1});
  const Transfer receiving = initiator_->recv(*peer_, buffer);
  std::atomic<int> let_go{0};
  std::atomic<int> called_back{0};
  reading.on_complete([&](const Status& status) { called_back += status.code() == Errc::shutting_down; });
  std::vector<std::thread> waiters;
  waiters.emplace_back([&] { let_go += reading.wait().code() == Errc::shutting_down; });
  waiters.emplace_back([&] { let_go += receiving.wait().code() == Errc::shutting_down; });
  std::this_thread::sleep_for(50ms);
  end(initiator_);
  for (auto& waiter : waiters) waiter.join();
  EXPECT_EQ(let_go, 2);
  EXPECT_EQ(called_back, 1) << "callbacks have run when the engine is gone";
}

TEST_P(ShutdownTest, AnEngineMayEndInACallbackOfItsOwn) {
  for (const Dispatch where : {Dispatch::offload, Dispatch::in_place}) {
    initiator_ = start(config_of("initiator", GetParam()));
    peer_ = initiator_->connect(target_->address()).value();
    ours_ = initiator_->allocate("local", many * share).value();
    std::promise<void> ended;
    const Slice slice{0, 0, share};
    const Transfer last = initiator_->read(*peer_, ours_, "kv", {&slice, 1}, {.deadline = 5s});
    const std::vector<Transfer> others = begin_many();
    last.on_complete(
        [&](const Status&) {
          initiator_.reset();
          ended.set_value();
        },
        where);
    ASSERT_EQ(ended.get_future().wait_for(slow(2s)), std::future_status::ready);
    for (const Transfer& transfer : others) EXPECT_TRUE(transfer.wait_for(slow(2s)));
  }
  EXPECT_TRUE(eventually(slow(5s), [&] { return target_->peers().empty(); }));
}

TEST_P(ShutdownTest, CallbacksThatThrowStopNothing) {
  const Slice slice{0, 0, share};
  for (const Dispatch where : {Dispatch::offload, Dispatch::in_place}) {
    const Transfer transfer = initiator_->read(*peer_, ours_, "kv", {&slice, 1});
    transfer.on_complete([](const Status&) { throw 1; }, where);
    EXPECT_TRUE(transfer.wait());
  }
  std::promise<Status> told;
  initiator_->read(*peer_, ours_, "kv", {&slice, 1}).on_complete([&](const Status& status) { told.set_value(status); });
  auto answer = told.get_future();
  ASSERT_EQ(answer.wait_for(slow(2s)), std::future_status::ready);
  EXPECT_TRUE(answer.get());
}

TEST_P(ShutdownTest, HandlesOutliveTheEngine) {
  const RemoteHandle remote = initiator_->find_region(*peer_, "kv").value();
  const Slice slice{0, 0, share};
  const Transfer transfer = initiator_->read(*peer_, ours_, remote, {&slice, 1});
  ASSERT_TRUE(transfer.wait());
  end(initiator_);
  end(target_);
  EXPECT_TRUE(transfer.status().is_ok());
  EXPECT_EQ(transfer.bytes(), share);
  transfer.cancel();
  int called = 0;
  transfer.on_complete([&](const Status&) { ++called; });
  EXPECT_EQ(called, 1);
  EXPECT_EQ(peer_->name(), "target");
  EXPECT_FALSE(peer_->describe().empty());
  EXPECT_EQ(remote.size(), many * share);
  EXPECT_EQ(wrong_bytes(ours_.bytes().first(share), 1), 0u) << "allocated memory stays while a handle is held";
  std::memset(theirs_.data(), 3, theirs_.size());
  peer_.reset();

  // What the old engine's handles mean, the new one must refuse.
  Engine next = start(config_of("next", GetParam()));
  EXPECT_EQ(next.read(Peer(), ours_, remote, {&slice, 1}).wait().code(), Errc::invalid_argument);
  EXPECT_EQ(next.unregister_region(ours_).code(), Errc::unknown_region);
}

TEST_P(ShutdownTest, AnEngineMayEndWhileItConnects) {
  EngineConfig config = config_of("hasty", GetParam());
  std::optional<Engine> engine = start(config);
  ASSERT_TRUE(engine->connect(target_->address()));
  end(engine);
  // One that never had a peer, and one whose peer was never there.
  engine = start(config);
  end(engine);
  config.connect_timeout = 100ms;
  engine = start(config);
  EXPECT_EQ(engine->connect("tcp://127.0.0.1:1").status().code(), Errc::unreachable);
  end(engine);
}

}  // namespace
}  // namespace kvferry::test
