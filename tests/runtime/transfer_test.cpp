#include <atomic>
#include <condition_variable>
#include <coroutine>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <kvferry/runtime/transfer.hpp>
#include <kvferry/runtime/transfer_state.hpp>

namespace kvferry {
namespace {

using namespace std::chrono_literals;

// Stands for an engine: notes what it is asked, runs offloaded tasks on a thread of its own.
class FakeOwner : public TransferOwner {
 public:
  FakeOwner() : thread_([this] { run(); }) {}
  ~FakeOwner() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }

  void cancel(TransferState& transfer) override {
    cancels.fetch_add(1);
    last_cancelled.store(&transfer);
  }
  void offload(std::function<void()> task) override {
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    wake_.notify_one();
  }
  std::thread::id thread() const { return thread_.get_id(); }

  std::atomic<int> cancels{0};
  std::atomic<TransferState*> last_cancelled{nullptr};

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  bool stop_ = false;
  std::thread thread_;
};

RefPtr<TransferState> running(std::shared_ptr<TransferOwner> owner = nullptr, Duration limit = 30s) {
  return TransferState::create({.deadline = Clock::now() + limit, .owner = std::move(owner)});
}

// ---- what a transfer is made of

TEST(TransferState, KeepsTheRequest) {
  const std::vector<Slice> slices{{0, 100, 10}, {10, 110, 10}, {5, 5, 0}, {50, 50, 1}};
  auto local = std::make_shared<RegionRecord>();
  auto remote = std::make_shared<RemoteRegion>();
  const TimePoint deadline = Clock::now() + 1s;
  const auto state = TransferState::create({.op = Op::write_imm,
                                            .priority = Priority::critical,
                                            .deadline = deadline,
                                            .local = local,
                                            .remote = remote,
                                            .slices = slices,
                                            .immediate = 77});
  EXPECT_EQ(state->op(), Op::write_imm);
  EXPECT_EQ(state->priority(), Priority::critical);
  EXPECT_EQ(state->deadline(), deadline);
  EXPECT_EQ(state->local(), local.get());
  EXPECT_EQ(state->remote(), remote);
  EXPECT_EQ(state->immediate(), 77u);
  EXPECT_EQ(std::vector<Slice>(state->slices().begin(), state->slices().end()),
            (std::vector<Slice>{{0, 100, 20}, {50, 50, 1}}));
  EXPECT_EQ(state->bytes(), 21u);
  EXPECT_TRUE(state->message().empty());
}

TEST(TransferState, CopiesTheMessage) {
  std::string text = "a message that is copied";
  const auto state = TransferState::create({.op = Op::send, .message = std::as_bytes(std::span(text))});
  std::fill(text.begin(), text.end(), '?');
  ASSERT_EQ(state->message().size(), text.size());
  EXPECT_EQ(std::memcmp(state->message().data(), "a message that is copied", text.size()), 0);
  EXPECT_EQ(state->bytes(), text.size());
}

TEST(TransferState, LetsGoOfRegionsAndOwnerAtTheEnd) {
  auto owner = std::make_shared<FakeOwner>();
  auto local = std::make_shared<RegionRecord>();
  auto remote = std::make_shared<RemoteRegion>();
  const auto state = TransferState::create({.local = local, .remote = remote, .owner = owner});
  EXPECT_EQ(owner.use_count(), 2);
  state->complete({});
  EXPECT_EQ(owner.use_count(), 1);
  EXPECT_EQ(local.use_count(), 1);
  EXPECT_EQ(remote.use_count(), 1);
}

TEST(Transfer, OperationsHaveNames) {
  EXPECT_EQ(to_string(Op::read), "read");
  EXPECT_EQ(to_string(Op::write_imm), "write_imm");
  EXPECT_EQ(to_string(Op::recv), "recv");
}

// ---- the end and waiting for it

TEST(Transfer, RunsUntilItIsCompleted) {
  const auto state = running();
  const Transfer transfer(state);
  EXPECT_TRUE(transfer.valid());
  EXPECT_FALSE(transfer.done());
  EXPECT_EQ(transfer.status().code(), Errc::invalid_argument);
  state->complete({Errc::corrupted, "slice 3"});
  EXPECT_TRUE(transfer.done());
  EXPECT_EQ(transfer.status().to_string(), "corrupted: slice 3");
  EXPECT_EQ(transfer.wait().code(), Errc::corrupted);
}

TEST(Transfer, MayBeMadeEnded) {
  const Transfer transfer = Transfer::ended({Errc::no_path, "none"});
  EXPECT_TRUE(transfer.done());
  EXPECT_EQ(transfer.wait().to_string(), "no_path: none");
  EXPECT_TRUE(Transfer::ended({}).wait().is_ok());
}

TEST(Transfer, EmptyHandleBehavesAsEnded) {
  const Transfer transfer;
  EXPECT_FALSE(transfer.valid());
  EXPECT_TRUE(transfer.done());
  EXPECT_EQ(transfer.wait().code(), Errc::invalid_argument);
  EXPECT_EQ(transfer.bytes(), 0u);
  EXPECT_TRUE(transfer.wait_for(1h));
  transfer.cancel();
  Errc seen = Errc::ok;
  transfer.on_complete([&](const Status& status) { seen = status.code(); });
  EXPECT_EQ(seen, Errc::invalid_argument);
}

TEST(Transfer, WaitForKeepsItsLimit) {
  const Transfer transfer(running());
  const TimePoint start = Clock::now();
  EXPECT_FALSE(transfer.wait_for(5ms));
  EXPECT_GE(Clock::now() - start, 5ms);
  EXPECT_FALSE(transfer.wait_for(0ms));
  EXPECT_FALSE(transfer.wait_for(Duration::min()));
}

TEST(Transfer, WaitForEverIsWokenByTheEnd) {
  const auto state = running();
  std::thread waiter([transfer = Transfer(state)] { EXPECT_TRUE(transfer.wait_for(Duration::max())); });
  std::this_thread::sleep_for(2ms);  // long past the spin window: the waiter sleeps
  state->complete({});
  waiter.join();
}

TEST(Transfer, WaitGivesUpOnAnEngineThatForgotIt) {
  const Transfer transfer(running(nullptr, -10s));
  const Status status = transfer.wait();
  EXPECT_EQ(status.code(), Errc::internal);
  EXPECT_NE(status.text().find("did not end this read"), std::string_view::npos) << status.text();
  EXPECT_FALSE(transfer.done());
}

TEST(Transfer, ManyWaitersRaceWithTheEnd) {
  for (int round = 0; round < 100; ++round) {
    auto state = running();
    std::vector<std::thread> waiters;
    for (int i = 0; i < 4; ++i)
      waiters.emplace_back([transfer = Transfer(state), i] {
        if (i % 2 == 0) {
          EXPECT_EQ(transfer.wait().code(), Errc::timed_out);
        } else {
          while (!transfer.wait_for(100us)) continue;
          EXPECT_EQ(transfer.status().text(), "late");
        }
      });
    state->complete({Errc::timed_out, "late"});
    state = {};
    for (auto& waiter : waiters) waiter.join();
  }
}

// ---- callbacks

TEST(Transfer, CallbacksRunInPlaceWithoutAnOwner) {
  const auto state = running();
  const Transfer transfer(state);
  std::vector<std::string> seen;
  transfer.on_complete([&](const Status& status) { seen.push_back("first " + status.to_string()); });
  transfer.on_complete([&](const Status& status) { seen.push_back("second " + status.to_string()); });
  EXPECT_TRUE(seen.empty());
  state->complete({});
  EXPECT_EQ(seen, (std::vector<std::string>{"first ok", "second ok"}));
  transfer.on_complete([&](const Status& status) { seen.push_back("late " + status.to_string()); });
  EXPECT_EQ(seen.back(), "late ok");
}

TEST(Transfer, CallbacksRunWhereTheyWereAskedTo) {
  std::thread::id offloaded;
  std::thread::id in_place;
  std::thread::id offload_thread;
  {
    const auto owner = std::make_shared<FakeOwner>();
    offload_thread = owner->thread();
    const auto state = running(owner);
    const Transfer transfer(state);
    transfer.on_complete([&](const Status&) { offloaded = std::this_thread::get_id(); });
    transfer.on_complete([&](const Status&) { in_place = std::this_thread::get_id(); }, Dispatch::in_place);
    state->complete({});
  }
  EXPECT_EQ(in_place, std::this_thread::get_id());
  EXPECT_EQ(offloaded, offload_thread);
}

TEST(Transfer, EveryCallbackRunsOnceHoweverItRacesWithTheEnd) {
  constexpr int per_thread = 20;
  std::atomic<int> calls{0};
  const auto owner = std::make_shared<FakeOwner>();
  for (int round = 0; round < 50; ++round) {
    const auto state = running(owner);
    std::vector<std::thread> adders;
    for (int t = 0; t < 3; ++t)
      adders.emplace_back([&calls, transfer = Transfer(state), t] {
        for (int i = 0; i < per_thread; ++i)
          transfer.on_complete([&calls](const Status&) { calls.fetch_add(1); },
                               t == 0 ? Dispatch::in_place : Dispatch::offload);
      });
    state->complete({});
    for (auto& adder : adders) adder.join();
  }
  // Tasks run in order, so one more behind them says that all have run.
  std::atomic<bool> flushed{false};
  owner->offload([&] {
    flushed = true;
    flushed.notify_one();
  });
  flushed.wait(false);
  EXPECT_EQ(calls.load(), 50 * 3 * per_thread);
}

TEST(Transfer, ACallbackMayDropTheLastHandle) {
  auto handle = std::make_unique<Transfer>(running());
  Transfer copy = *handle;
  handle->on_complete([&](const Status&) {
    handle.reset();
    copy = {};
  });
  // The state ends through a raw pointer, as a poller would that holds no reference besides.
  auto state = running();
  auto* raw = state.get();
  auto only = std::make_unique<Transfer>(std::move(state));
  only->on_complete([&](const Status&) { only.reset(); });
  raw->complete({});
  EXPECT_EQ(only, nullptr);
  EXPECT_TRUE(copy.valid());
}

// ---- cancel

TEST(Transfer, CancelAsksTheOwnerWhileItRuns) {
  const auto owner = std::make_shared<FakeOwner>();
  const auto state = running(owner);
  const Transfer transfer(state);
  transfer.cancel();
  EXPECT_EQ(owner->cancels.load(), 1);
  EXPECT_EQ(owner->last_cancelled.load(), state.get());
  EXPECT_FALSE(transfer.done());
  state->complete({Errc::cancelled, ""});
  transfer.cancel();
  EXPECT_EQ(owner->cancels.load(), 1);
}

TEST(Transfer, CancelRacesWithTheEnd) {
  for (int round = 0; round < 100; ++round) {
    auto owner = std::make_shared<FakeOwner>();
    const auto state = running(owner);
    owner.reset();  // the transfer alone keeps its owner
    std::thread canceller([transfer = Transfer(state)] {
      for (int i = 0; i < 10; ++i) transfer.cancel();
    });
    state->complete({});
    canceller.join();
    EXPECT_TRUE(state->done());
  }
}

TEST(Transfer, OutlivesItsOwner) {
  Transfer transfer;
  {
    const auto owner = std::make_shared<FakeOwner>();
    const auto state = running(owner);
    transfer = Transfer(state);
    state->complete({Errc::shutting_down, "engine 'e' was destroyed"});
  }
  EXPECT_EQ(transfer.wait().code(), Errc::shutting_down);
  transfer.cancel();
  bool called = false;
  transfer.on_complete([&](const Status&) { called = true; });
  EXPECT_TRUE(called);
}

// ---- coroutines

struct Task {
  struct promise_type {
    Task get_return_object() noexcept { return {}; }
    std::suspend_never initial_suspend() noexcept { return {}; }
    std::suspend_never final_suspend() noexcept { return {}; }
    void return_void() noexcept {}
    void unhandled_exception() noexcept { std::terminate(); }
  };
};

Task await_into(Transfer transfer, std::atomic<int>& result) {
  const Status status = co_await transfer;
  result.store(static_cast<int>(status.code()));
  result.notify_one();
}

TEST(Transfer, CoroutineGoesOnAtOnceWhenItHasEnded) {
  std::atomic<int> result{-1};
  await_into(Transfer::ended({Errc::timed_out, ""}), result);
  EXPECT_EQ(result.load(), static_cast<int>(Errc::timed_out));
}

TEST(Transfer, CoroutineResumesOnTheOffloadThread) {
  const auto owner = std::make_shared<FakeOwner>();
  const auto state = running(owner);
  std::atomic<int> result{-1};
  await_into(Transfer(state), result);
  EXPECT_EQ(result.load(), -1);
  state->complete({Errc::peer_lost, ""});
  result.wait(-1);
  EXPECT_EQ(result.load(), static_cast<int>(Errc::peer_lost));
}

TEST(Transfer, CoroutineRacesWithTheEnd) {
  const auto owner = std::make_shared<FakeOwner>();
  for (int round = 0; round < 100; ++round) {
    auto state = running(owner);
    std::atomic<int> result{-1};
    std::thread completer([state] { state->complete({}); });
    await_into(Transfer(std::exchange(state, {})), result);
    result.wait(-1);
    completer.join();
    EXPECT_EQ(result.load(), 0);
  }
}

// ---------------------------------------------------------------- what a watching waiter takes over

TEST(WatcherTest, ManyTransfersEndUnderTheirWatchersAndLetGo) {
  const auto owner = std::make_shared<FakeOwner>();
  const auto local = std::make_shared<const RegionRecord>();
  const auto remote = std::make_shared<const RemoteRegion>();
  for (int i = 0; i < 2000; ++i) {
    TransferState::Request request;
    request.owner = owner;
    request.local = local;
    request.remote = remote;
    auto state = TransferState::create(std::move(request));
    std::thread carrier([reference = state]() mutable { TransferState::complete(std::move(reference), {}); });
    // Sometimes the watch is over before the end, sometimes it sees it, sometimes it comes late.
    if (i % 3 == 0) state->wait_until(Clock::now() + 1us, 1us);
    ASSERT_TRUE(state->wait_until(Clock::now() + 10s, i % 2 == 0 ? Duration(1s) : Duration(10us)));
    EXPECT_TRUE(state->status().is_ok());
    carrier.join();
    ASSERT_EQ(local.use_count(), 1) << "a kept handle keeps the region";
    ASSERT_EQ(remote.use_count(), 1);
    ASSERT_EQ(owner.use_count(), 1);
  }
}

TEST(WatcherTest, CallbacksRunThoughAWaiterWatches) {
  for (int i = 0; i < 500; ++i) {
    auto state = TransferState::create({});
    std::atomic<int> calls{0};
    std::thread caller([&] { state->on_complete([&](const Status&) { ++calls; }, Dispatch::in_place); });
    std::thread carrier([reference = state]() mutable { TransferState::complete(std::move(reference), {}); });
    ASSERT_TRUE(state->wait_until(Clock::now() + 10s, 1s));
    caller.join();
    carrier.join();
    ASSERT_EQ(calls.load(), 1);
  }
}

TEST(WatcherTest, SeveralWaitersAllSeeTheEnd) {
  for (int i = 0; i < 200; ++i) {
    auto state = TransferState::create({});
    std::vector<std::thread> waiters;
    std::atomic<int> seen{0};
    for (int w = 0; w < 3; ++w)
      waiters.emplace_back([&, w] {
        if (state->wait_until(Clock::now() + 10s, w == 0 ? Duration(1s) : Duration::zero())) ++seen;
      });
    TransferState::complete(RefPtr<TransferState>(state), {});
    for (std::thread& waiter : waiters) waiter.join();
    ASSERT_EQ(seen.load(), 3);
  }
}

// ---------------------------------------------------------------- waiters that take part

class CountedWork final : public SharedWork {
 public:
  explicit CountedWork(int shares) : left_(shares) {}
  bool take_part() noexcept override {
    if (left_.fetch_sub(1) <= 0) return false;
    ++done;
    return true;
  }
  std::atomic<int> done{0};

 private:
  std::atomic<int> left_;
};

TEST(SharedWorkTest, AWaiterTakesPartUntilNothingIsLeft) {
  const auto state = TransferState::create({});
  const RefPtr<CountedWork> work(new CountedWork(100), true);
  state->work_offer().make(RefPtr<SharedWork>(work.get()));
  EXPECT_FALSE(state->wait_until(Clock::now() + 50ms, 10ms));
  EXPECT_EQ(work->done.load(), 100);
}

TEST(SharedWorkTest, AWaiterWhoseTimeIsUpStopsTakingPart) {
  const auto state = TransferState::create({});
  const RefPtr<CountedWork> endless(new CountedWork(std::numeric_limits<int>::max()), true);
  state->work_offer().make(RefPtr<SharedWork>(endless.get()));
  EXPECT_FALSE(state->wait_until(Clock::now() + 20ms, 10us));
  EXPECT_GT(endless->done.load(), 0);
}

TEST(SharedWorkTest, TheLatestOfferCountsAndOnlyItCanBeWithdrawn) {
  WorkOffer offer;
  EXPECT_FALSE(offer.take_part());
  const RefPtr<CountedWork> first(new CountedWork(5), true);
  const RefPtr<CountedWork> second(new CountedWork(5), true);
  offer.make(RefPtr<SharedWork>(first.get()));
  offer.make(RefPtr<SharedWork>(second.get()));
  EXPECT_TRUE(offer.take_part());
  EXPECT_EQ(first->done.load(), 0);
  offer.withdraw(first.get());
  EXPECT_TRUE(offer.take_part());
  offer.withdraw(second.get());
  EXPECT_FALSE(offer.take_part());
  EXPECT_EQ(second->done.load(), 2);
}

}  // namespace
}  // namespace kvferry
