#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <kvferry/actors/inbox.hpp>

namespace kvferry {
namespace {

using namespace std::chrono_literals;

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

// ---------------------------------------------------------------- SequenceWindow

TEST(SequenceWindow, KnowsWhatWasMarkedInAnyOrder) {
  SequenceWindow window;
  for (const std::uint64_t number : {5u, 1u, 3u}) {
    EXPECT_FALSE(window.seen(number)) << number;
    window.mark(number);
    EXPECT_TRUE(window.seen(number)) << number;
  }
  EXPECT_FALSE(window.seen(2));
  EXPECT_FALSE(window.seen(4));
  EXPECT_FALSE(window.seen(6));
}

TEST(SequenceWindow, StartsWithoutAnyNumberSeen) {
  const SequenceWindow window;
  for (const std::uint64_t number : {0ull, 1ull, 4096ull, ~0ull}) EXPECT_FALSE(window.seen(number)) << number;
}

TEST(SequenceWindow, TakesWhatSlidOutForSeen) {
  SequenceWindow window;
  window.mark(1);
  window.mark(SequenceWindow::width + 1);
  EXPECT_TRUE(window.seen(1)) << "too old to tell: applying it twice would be worse than dropping it";
  EXPECT_FALSE(window.seen(2)) << "the oldest number inside the window";
  window.mark(SequenceWindow::width + 2);
  EXPECT_TRUE(window.seen(2));
}

TEST(SequenceWindow, FarJumpsForgetWhatTheyPass) {
  SequenceWindow window;
  for (std::uint64_t number = 1; number <= 100; ++number) window.mark(number);
  // The same places of the ring as 1..100, many turns later.
  const std::uint64_t far = 1000 * SequenceWindow::width + 100;
  window.mark(far);
  for (std::uint64_t back = 1; back < SequenceWindow::width; ++back) EXPECT_FALSE(window.seen(far - back)) << back;
  EXPECT_TRUE(window.seen(far));
  window.mark(far + SequenceWindow::width - 1);
  EXPECT_TRUE(window.seen(far)) << "a jump of just less than the window keeps its oldest number";
  EXPECT_FALSE(window.seen(far + 1));
}

TEST(SequenceWindow, WorksUpToTheLargestNumber) {
  SequenceWindow window;
  const std::uint64_t last = std::numeric_limits<std::uint64_t>::max();
  window.mark(last - 1);
  EXPECT_FALSE(window.seen(last));
  window.mark(last);
  EXPECT_TRUE(window.seen(last));
  EXPECT_TRUE(window.seen(last - 1));
  EXPECT_FALSE(window.seen(last - 2));
}

// Against the obvious model: the set of all numbers marked, and a rule for those too old.
TEST(SequenceWindow, BehavesLikeASet) {
  for (const unsigned seed : {1u, 2u, 3u, 4u}) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    SequenceWindow window;
    std::set<std::uint64_t> marked;
    std::uint64_t highest = 0;
    for (int i = 0; i < 50000; ++i) {
      const std::uint64_t spread = random() % 100 == 0 ? 3 * SequenceWindow::width : 200;
      const std::uint64_t low = highest > SequenceWindow::width + 50 ? highest - SequenceWindow::width - 50 : 1;
      // Mostly near the front, sometimes anywhere in the window, a little before it, or far ahead.
      const std::uint64_t number =
          random() % 3 == 0 ? low + random() % (highest - low + 2) : highest + 1 + random() % spread;
      const bool too_old = number <= highest && highest - number >= SequenceWindow::width;
      const bool expected = too_old || marked.contains(number);
      ASSERT_EQ(window.seen(number), expected) << number << " with " << highest << " as the highest";
      if (expected) continue;
      window.mark(number);
      marked.insert(number);
      highest = std::max(highest, number);
    }
  }
}

// ---------------------------------------------------------------- MessageBox

TEST(MessageBox, GivesMessagesBackInOrder) {
  MessageBox box;
  EXPECT_TRUE(box.empty());
  std::vector<std::byte> buffer(64);
  EXPECT_EQ(box.take(buffer), std::nullopt);
  EXPECT_TRUE(box.offer(1, bytes_of("first")));
  EXPECT_TRUE(box.offer(2, bytes_of("")));
  EXPECT_TRUE(box.offer(7, bytes_of("third")));
  EXPECT_FALSE(box.empty());
  ASSERT_EQ(box.take(buffer), 5u);
  EXPECT_EQ(std::memcmp(buffer.data(), "first", 5), 0);
  EXPECT_EQ(box.take(buffer), 0u) << "an empty message is a message";
  ASSERT_EQ(box.take(buffer), 5u);
  EXPECT_EQ(std::memcmp(buffer.data(), "third", 5), 0);
  EXPECT_TRUE(box.empty());
}

TEST(MessageBox, KeepsARepeatedMessageOnce) {
  MessageBox box;
  std::vector<std::byte> buffer(8);
  EXPECT_TRUE(box.offer(1, bytes_of("a")));
  EXPECT_TRUE(box.offer(1, bytes_of("a"))) << "the repeat is acknowledged";
  EXPECT_EQ(box.take(buffer), 1u);
  EXPECT_TRUE(box.offer(1, bytes_of("a"))) << "also after it was taken";
  EXPECT_TRUE(box.empty());
}

TEST(MessageBox, RefusesWhatDoesNotFitAndTakesItLater) {
  MessageBox box;
  std::vector<std::byte> buffer(8);
  for (std::size_t i = 1; i <= MessageBox::capacity; ++i) ASSERT_TRUE(box.offer(i, bytes_of("x")));
  EXPECT_FALSE(box.offer(MessageBox::capacity + 1, bytes_of("late")));
  EXPECT_TRUE(box.offer(MessageBox::capacity, bytes_of("x"))) << "a repeat needs no room";
  EXPECT_EQ(box.take(buffer), 1u);
  EXPECT_TRUE(box.offer(MessageBox::capacity + 1, bytes_of("late")));
  for (std::size_t i = 2; i <= MessageBox::capacity; ++i) ASSERT_EQ(box.take(buffer), 1u);
  EXPECT_EQ(box.take(buffer), 4u);
  EXPECT_TRUE(box.empty());
}

TEST(MessageBox, ATooSmallBufferLeavesTheMessage) {
  MessageBox box;
  ASSERT_TRUE(box.offer(1, bytes_of("twelve bytes")));
  std::vector<std::byte> small(11, std::byte{0x7f});
  EXPECT_EQ(box.take(small), 12u);
  EXPECT_TRUE(std::all_of(small.begin(), small.end(), [](std::byte b) { return b == std::byte{0x7f}; }));
  EXPECT_EQ(box.take({}), 12u);
  EXPECT_FALSE(box.empty());
  std::vector<std::byte> fits(12);
  EXPECT_EQ(box.take(fits), 12u);
  EXPECT_EQ(std::memcmp(fits.data(), "twelve bytes", 12), 0);
  EXPECT_TRUE(box.empty());
}

TEST(MessageBox, OneOffersAnotherTakes) {
  MessageBox box;
  constexpr std::uint32_t count = 20000;
  std::thread writer([&] {
    for (std::uint32_t i = 1; i <= count; ++i)
      while (!box.offer(i, std::as_bytes(std::span(&i, 1)))) std::this_thread::yield();
  });
  for (std::uint32_t expected = 1; expected <= count; ++expected) {
    std::uint32_t value = 0;
    while (box.empty()) std::this_thread::yield();
    ASSERT_EQ(box.take(std::as_writable_bytes(std::span(&value, 1))), sizeof value);
    ASSERT_EQ(value, expected);
  }
  writer.join();
}

// ---------------------------------------------------------------- NotificationQueue

TEST(NotificationQueue, GivesNotificationsBackInOrder) {
  NotificationQueue queue;
  EXPECT_FALSE(queue.pop(0s));
  EXPECT_TRUE(queue.push({"prefill-0", 11, 1}));
  EXPECT_TRUE(queue.push({"prefill-1", 12, 2}));
  const auto first = queue.pop(0s);
  ASSERT_TRUE(first);
  EXPECT_EQ(first->peer, "prefill-0");
  EXPECT_EQ(first->incarnation, 11u);
  EXPECT_EQ(first->immediate, 1u);
  const auto second = queue.pop(0s);
  ASSERT_TRUE(second);
  EXPECT_EQ(second->immediate, 2u);
  EXPECT_FALSE(queue.pop(0s));
}

TEST(NotificationQueue, IsBounded) {
  NotificationQueue queue;
  for (std::size_t i = 0; i < NotificationQueue::capacity; ++i) ASSERT_TRUE(queue.push({"p", 1, 0}));
  EXPECT_FALSE(queue.push({"p", 1, 0}));
  EXPECT_TRUE(queue.pop(0s));
  EXPECT_TRUE(queue.push({"p", 1, 0}));
}

TEST(NotificationQueue, WakesAWaiter) {
  NotificationQueue queue;
  std::thread pusher([&] { EXPECT_TRUE(queue.push({"p", 1, 42})); });
  const auto got = queue.pop(30s);
  pusher.join();
  ASSERT_TRUE(got);
  EXPECT_EQ(got->immediate, 42u);
}

TEST(NotificationQueue, CloseEndsEveryWait) {
  NotificationQueue queue;
  std::atomic<int> ended{0};
  std::vector<std::thread> waiters;
  for (int i = 0; i < 3; ++i)
    waiters.emplace_back([&] {
      EXPECT_FALSE(queue.pop(30s));
      ended.fetch_add(1);
    });
  queue.close();
  for (auto& waiter : waiters) waiter.join();
  EXPECT_EQ(ended, 3);
  EXPECT_FALSE(queue.pop(30s)) << "nobody waits any more once it is closed";
}

TEST(NotificationQueue, WhatCameBeforeCloseCanStillBeTaken) {
  NotificationQueue queue;
  ASSERT_TRUE(queue.push({"p", 1, 9}));
  queue.close();
  EXPECT_TRUE(queue.pop(30s));
  EXPECT_FALSE(queue.pop(30s));
}

TEST(NotificationQueue, TheLongestWaitIsAWait) {
  NotificationQueue queue;
  // A wait that overflowed would be over before anything has happened.
  std::thread closer([&] {
    std::this_thread::sleep_for(20ms);
    queue.close();
  });
  const TimePoint start = Clock::now();
  EXPECT_FALSE(queue.pop(Duration::max()));
  EXPECT_GE(Clock::now() - start, 15ms);
  closer.join();
}

}  // namespace
}  // namespace kvferry
