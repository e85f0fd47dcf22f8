#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <poll.h>

#include <kvferry/actors/submissions.hpp>

namespace kvferry {
namespace {

using namespace std::chrono_literals;

RefPtr<TransferState> transfer(std::uint64_t number, std::shared_ptr<TransferOwner> owner = {}) {
  auto made = TransferState::create({.deadline = Clock::now() + 30s, .owner = std::move(owner)});
  made->sequence = number;
  return made;
}

std::shared_ptr<Submissions> make_submissions() {
  return std::make_shared<Submissions>([](std::function<void()> task) { task(); });
}

std::vector<RefPtr<TransferState>> drain(TransferState* list) {
  std::vector<RefPtr<TransferState>> taken;
  while (list) taken.emplace_back(std::exchange(list, list->next), true);
  return taken;
}

bool rung(const Submissions& submissions, int limit_ms) {
  pollfd fd{submissions.wake_fd(), POLLIN, 0};
  return ::poll(&fd, 1, limit_ms) == 1;
}

TEST(Submissions, GivesBackInTheOrderOfPushes) {
  const auto submissions = make_submissions();
  EXPECT_TRUE(submissions->empty());
  EXPECT_EQ(submissions->take(), nullptr);
  for (std::uint64_t i = 1; i <= 100; ++i) ASSERT_TRUE(submissions->push(transfer(i)));
  EXPECT_FALSE(submissions->empty());
  const auto taken = drain(submissions->take());
  ASSERT_EQ(taken.size(), 100u);
  for (std::uint64_t i = 0; i < 100; ++i) EXPECT_EQ(taken[i]->sequence, i + 1);
  EXPECT_TRUE(submissions->empty());
  EXPECT_EQ(submissions->take(), nullptr);
}

TEST(Submissions, CloseRefusesAndReturnsWhatWasPushed) {
  const auto submissions = make_submissions();
  ASSERT_TRUE(submissions->push(transfer(1)));
  ASSERT_TRUE(submissions->push(transfer(2)));
  const auto left = drain(submissions->close());
  ASSERT_EQ(left.size(), 2u);
  EXPECT_EQ(left[0]->sequence, 1u);
  EXPECT_EQ(left[1]->sequence, 2u);
  EXPECT_FALSE(submissions->push(transfer(3)));
  EXPECT_EQ(submissions->take(), nullptr);
  EXPECT_EQ(submissions->close(), nullptr) << "closing twice finds nothing";
  EXPECT_FALSE(submissions->push(transfer(4)));
}

TEST(Submissions, ARefusedTransferStaysWithItsCaller) {
  const auto submissions = make_submissions();
  EXPECT_EQ(submissions->close(), nullptr);
  auto refused = transfer(1);
  EXPECT_FALSE(submissions->push(refused));
  refused->complete({Errc::shutting_down, "refused"});
  EXPECT_TRUE(refused->status() == Errc::shutting_down);
}

TEST(Submissions, HandsCancelsOver) {
  const auto submissions = make_submissions();
  EXPECT_TRUE(submissions->take_cancelled().empty());
  const auto first = transfer(1, submissions);
  const auto second = transfer(2, submissions);
  EXPECT_FALSE(first->cancel_requested());
  first->cancel();
  second->cancel();
  EXPECT_TRUE(first->cancel_requested());
  EXPECT_FALSE(submissions->empty()) << "a poller about to sleep must see it";
  EXPECT_EQ(submissions->take_cancelled(), (std::vector{first, second}));
  EXPECT_TRUE(submissions->take_cancelled().empty());
  EXPECT_TRUE(submissions->empty());
  first->complete({});
  second->complete({});
  first->cancel();
  EXPECT_TRUE(submissions->empty()) << "what has ended can not be cancelled";
}

TEST(Submissions, RunsOffloadedTasksWhereItWasTold) {
  int runs = 0;
  Submissions submissions([&](std::function<void()> task) {
    ++runs;
    task();
  });
  int done = 0;
  submissions.offload([&] { ++done; });
  EXPECT_EQ(runs, 1);
  EXPECT_EQ(done, 1);
}

TEST(Submissions, RingsOnlyASleeper) {
  const auto submissions = make_submissions();
  ASSERT_TRUE(submissions->push(transfer(1)));
  submissions->ring();
  EXPECT_FALSE(rung(*submissions, 0)) << "a poller that is awake costs no system call";

  submissions->begin_sleep();
  EXPECT_FALSE(submissions->empty()) << "looked at once more before sleeping";
  submissions->end_sleep();
  drain(submissions->take());

  submissions->begin_sleep();
  EXPECT_TRUE(submissions->empty());
  ASSERT_TRUE(submissions->push(transfer(2)));
  EXPECT_TRUE(rung(*submissions, 0));
  submissions->end_sleep();
  EXPECT_FALSE(rung(*submissions, 0)) << "the bell is quiet again";
  drain(submissions->take());

  for (const bool by_cancel : {false, true}) {
    submissions->begin_sleep();
    const auto running = transfer(3, submissions);
    by_cancel ? running->cancel() : submissions->ring();
    EXPECT_TRUE(rung(*submissions, 0));
    submissions->end_sleep();
    submissions->take_cancelled();
    running->complete({});
  }
}

TEST(SharedOwner, TellsEveryGroupOfACancel) {
  const std::vector groups{make_submissions(), make_submissions(), make_submissions()};
  const auto running = transfer(1, std::make_shared<SharedOwner>(groups));
  running->cancel();
  for (const auto& group : groups) EXPECT_EQ(group->take_cancelled(), std::vector{running});
  running->complete({});
}

// A poller that follows the protocol: sleeps as deeply as it can between any two pushes. A lost wake-up
// shows as a sleep that runs into its limit while something lies in the queue.
class Consumer {
 public:
  explicit Consumer(std::shared_ptr<Submissions> submissions) : submissions_(std::move(submissions)) {}

  void run(std::size_t wanted) {
    while (taken_ < wanted && !lost_wake_up_) {
      for (auto& next : drain(submissions_->take())) {
        const std::size_t producer = next->sequence >> 32;
        last_.resize(std::max(last_.size(), producer + 1));
        ordered_ &= (next->sequence & 0xffffffff) == ++last_[producer];
        next->complete({});
        ++taken_;
      }
      cancels_ += submissions_->take_cancelled().size();
      if (taken_ < wanted) sleep();
    }
  }

  std::size_t taken_ = 0;
  std::size_t cancels_ = 0;
  std::size_t sleeps_ = 0;
  bool ordered_ = true;
  bool lost_wake_up_ = false;

 private:
  void sleep() {
    submissions_->begin_sleep();
    if (submissions_->empty()) {
      ++sleeps_;
      lost_wake_up_ = !rung(*submissions_, 20000);
    }
    submissions_->end_sleep();
  }

  std::shared_ptr<Submissions> submissions_;
  std::vector<std::uint64_t> last_;
};

TEST(Submissions, ManyProducersLoseNothingAndNoWakeUp) {
  constexpr std::size_t producers = 4;
  constexpr std::size_t each = 5000;
  const auto submissions = make_submissions();
  std::vector<std::thread> threads;
  for (std::size_t p = 0; p < producers; ++p)
    threads.emplace_back([&, p] {
      for (std::uint64_t i = 1; i <= each; ++i) {
        const auto state = transfer((std::uint64_t{p} << 32) | i, submissions);
        if (!submissions->push(state)) ADD_FAILURE() << "refused while open";
        if (i % 8 == 0) state->cancel();
        // Uneven, so that the consumer falls asleep at every stage of a push.
        if (i % (p + 3) == 0) std::this_thread::yield();
      }
    });
  Consumer consumer(submissions);
  consumer.run(producers * each);
  for (auto& thread : threads) thread.join();
  EXPECT_FALSE(consumer.lost_wake_up_);
  EXPECT_TRUE(consumer.ordered_) << "each caller's transfers stay in order";
  EXPECT_EQ(consumer.taken_, producers * each);
  EXPECT_LE(consumer.cancels_, producers * each / 8);
}

// One push at a time, answered before the next: the consumer is asleep or just going to for each.
TEST(Submissions, PingPongLosesNoWakeUp) {
  constexpr std::uint64_t rounds = 5000;
  const auto submissions = make_submissions();
  std::thread producer([&] {
    for (std::uint64_t i = 1; i <= rounds; ++i) {
      const auto state = transfer(i);
      if (!submissions->push(state)) ADD_FAILURE() << "refused while open";
      state->wait_until(Clock::now() + 20s, i % 2 ? 0us : 20us);
    }
  });
  Consumer consumer(submissions);
  consumer.run(rounds);
  producer.join();
  EXPECT_FALSE(consumer.lost_wake_up_);
  EXPECT_EQ(consumer.taken_, rounds);
}

TEST(Submissions, CloseAgainstPushesAccountsForEveryTransfer) {
  for (int round = 0; round < 50; ++round) {
    const auto submissions = make_submissions();
    std::atomic<std::size_t> accepted{0};
    std::vector<std::thread> threads;
    for (int p = 0; p < 3; ++p)
      threads.emplace_back([&] {
        for (std::uint64_t i = 1; i <= 200; ++i) {
          if (!submissions->push(transfer(i))) return;
          accepted.fetch_add(1);
        }
      });
    std::size_t taken = 0;
    for (int i = 0; i < round; ++i) taken += drain(submissions->take()).size();
    taken += drain(submissions->close()).size();
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(taken, accepted.load());
  }
}

}  // namespace
}  // namespace kvferry
