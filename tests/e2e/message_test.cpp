// Small messages arrive once and in order, notifications once and after their data, come what may.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <thread>

#include "tests/e2e/engines.hpp"

namespace kvferry::test {
namespace {

constexpr std::size_t most = 64 * kib;

class MessageTest : public ::testing::TestWithParam<const char*> {
 protected:
  Transfer send(std::span<const std::byte> message) { return engine().send(faulty_.pair.peer, message); }
  Engine& engine() { return faulty_.pair.initiator; }
  Engine& target() { return faulty_.pair.target; }

  /// With all that is on it.
  void lose_the_rail() {
    EXPECT_TRUE(eventually(slow(5s), [&] { return faulty_.pair.peer.describe().starts_with("up"); }));
    const std::uint64_t before = counter(engine(), "channels_lost");
    faulty_.plan->rail_down = true;
    EXPECT_TRUE(eventually(slow(5s), [&] { return counter(engine(), "channels_lost") > before; }));
    faulty_.plan->rail_down = false;
  }

  FaultyPair faulty_{GetParam()};
  Peer inbound_ = faulty_.pair.target.accept("initiator", slow(2s)).value();
};

INSTANTIATE_TEST_SUITE_P(, MessageTest, each_transport(), transport_name);

/// A message that says who sent it and which of his it is; its size and the rest follow from these.
std::vector<std::byte> numbered(std::uint32_t sender, std::uint32_t number) {
  std::vector<std::byte> message(8 + (sender * 7919 + number * 104729) % 3000);
  fill(message, sender * 100000 + number);
  std::memcpy(message.data(), &sender, 4);
  std::memcpy(message.data() + 4, &number, 4);
  return message;
}

/// Receives what numbered() made and checks that each sender's come in order, every byte right.
class OrderedReceiver {
 public:
  OrderedReceiver(Engine& engine, Peer peer) : engine_(engine), peer_(std::move(peer)), buffer_(most) {}

  void receive(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      const Transfer transfer = engine_.recv(peer_, buffer_);
      ASSERT_TRUE(transfer.wait()) << "message " << i << ": " << transfer.status().to_string();
      ASSERT_GE(transfer.bytes(), 8u);
      std::uint32_t sender = 0;
      std::uint32_t number = 0;
      std::memcpy(&sender, buffer_.data(), 4);
      std::memcpy(&number, buffer_.data() + 4, 4);
      ASSERT_EQ(number, next_[sender]++) << "from sender " << sender;
      const auto expected = numbered(sender, number);
      ASSERT_EQ(transfer.bytes(), expected.size());
      ASSERT_EQ(std::memcmp(buffer_.data(), expected.data(), expected.size()), 0);
    }
  }

 private:
  Engine& engine_;
  Peer peer_;
  std::vector<std::byte> buffer_;
  std::map<std::uint32_t, std::uint32_t> next_;
};

TEST_P(MessageTest, ManySendersEachStayInOrder) {
  constexpr std::uint32_t senders = 4;
  constexpr std::uint32_t each = 500;
  std::atomic<int> failures{0};
  std::vector<std::jthread> threads;
  for (std::uint32_t sender = 0; sender < senders; ++sender)
    threads.emplace_back([&, sender] {
      std::vector<Transfer> sent;
      for (std::uint32_t i = 0; i < each; ++i) sent.push_back(send(numbered(sender, i)));
      for (const Transfer& transfer : sent) failures += !transfer.wait().is_ok();
    });
  OrderedReceiver(target(), inbound_).receive(senders * each);
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
}

TEST_P(MessageTest, ALostRailLosesRepeatsAndReordersNothing) {
  constexpr std::uint32_t count = 2500;
  constexpr std::uint32_t part = 500;
  std::vector<Transfer> sent;
  for (std::uint32_t i = 0; i < count; ++i) sent.push_back(send(numbered(0, i)));
  OrderedReceiver receiver(target(), inbound_);
  receiver.receive(part);
  for (std::uint32_t received = part; received < count; received += part) {
    lose_the_rail();
    receiver.receive(part);
  }
  for (const Transfer& transfer : sent) EXPECT_TRUE(transfer.wait()) << transfer.status().to_string();
  std::byte buffer[8];
  EXPECT_EQ(target().recv(inbound_, buffer, {.deadline = 50ms}).wait().code(), Errc::timed_out) << "one came twice";
}

TEST_P(MessageTest, AnswersGoTheOtherWay) {
  const Peer back = target().connect(engine().address()).value();
  const Peer from_target = engine().accept("target", slow(2s)).value();
  std::byte ping{};
  std::byte pong{};
  for (int i = 0; i < 100; ++i) {
    ping = std::byte(i);
    const Transfer asked = send({&ping, 1});
    std::byte got{};
    ASSERT_TRUE(target().recv(inbound_, {&got, 1}).wait());
    ASSERT_EQ(got, ping);
    ASSERT_TRUE(target().send(back, {&got, 1}).wait());
    ASSERT_TRUE(engine().recv(from_target, {&pong, 1}).wait());
    ASSERT_EQ(pong, ping);
    ASSERT_TRUE(asked.wait());
  }
}

TEST_P(MessageTest, SizesFromNothingToTheLimit) {
  std::vector<std::byte> message(most + 1);
  fill(message, 1);
  std::vector<std::byte> buffer(most);
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{4095}, most - 1, most}) {
    const Transfer sent = send(std::span(message).first(size));
    const Transfer received = target().recv(inbound_, buffer);
    ASSERT_TRUE(received.wait()) << received.status().to_string();
    EXPECT_EQ(received.bytes(), size);
    EXPECT_EQ(wrong_bytes(std::span(buffer).first(size), 1), 0u);
    EXPECT_TRUE(sent.wait()) << sent.status().to_string();
  }
  const Transfer refused = send(message);
  EXPECT_EQ(refused.wait().code(), Errc::too_large);
  EXPECT_NE(refused.status().text().find("65536"), std::string_view::npos) << refused.status().text();
}

TEST_P(MessageTest, AMessageThatDoesNotFitStaysForALargerBuffer) {
  std::vector<std::byte> message(100);
  fill(message, 2);
  ASSERT_TRUE(send(message).wait());
  std::vector<std::byte> buffer(100);
  const Transfer small = target().recv(inbound_, std::span(buffer).first(99));
  EXPECT_EQ(small.wait().code(), Errc::too_large);
  EXPECT_NE(small.status().text().find("100"), std::string_view::npos) << small.status().text();
  EXPECT_EQ(nonzero_bytes(buffer), 0u);
  const Transfer enough = target().recv(inbound_, buffer);
  EXPECT_TRUE(enough.wait());
  EXPECT_EQ(wrong_bytes(buffer, 2), 0u);
}

TEST_P(MessageTest, AReceiveEndsOnItsDeadlineAndTakesNothing) {
  std::byte buffer[8] = {};
  const TimePoint begin = Clock::now();
  const Transfer nothing = target().recv(inbound_, buffer, {.deadline = 50ms});
  EXPECT_EQ(nothing.wait().code(), Errc::timed_out);
  EXPECT_GE(Clock::now() - begin, 50ms);
  EXPECT_LT(Clock::now() - begin, slow(400ms));
  const Transfer cancelled = target().recv(inbound_, buffer);
  cancelled.cancel();
  ASSERT_TRUE(cancelled.wait_for(slow(1s)));
  EXPECT_EQ(cancelled.status().code(), Errc::cancelled);

  const std::byte seven{7};
  ASSERT_TRUE(send({&seven, 1}).wait());
  EXPECT_EQ(buffer[0], std::byte{0}) << "an ended receive got the message";
  const Transfer received = target().recv(inbound_, buffer);
  EXPECT_TRUE(received.wait());
  EXPECT_EQ(buffer[0], seven);
}

TEST_P(MessageTest, ReceivesWaitInOrder) {
  std::vector<std::vector<std::byte>> buffers(20, std::vector<std::byte>(1));
  std::vector<Transfer> received;
  for (auto& buffer : buffers) received.push_back(target().recv(inbound_, buffer));
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const auto message = static_cast<std::byte>(i);
    ASSERT_TRUE(send({&message, 1}).wait());
  }
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    ASSERT_TRUE(received[i].wait());
    EXPECT_EQ(buffers[i][0], std::byte(i));
  }
}

TEST_P(MessageTest, ASenderWaitsForAReceiverThatIsSlow) {
  constexpr std::uint32_t count = 400;
  std::vector<Transfer> sent;
  for (std::uint32_t i = 0; i < count; ++i) sent.push_back(send(numbered(0, i)));
  std::this_thread::sleep_for(100ms);
  EXPECT_FALSE(sent.back().done()) << "the target must not hold whatever anybody sends";
  OrderedReceiver(target(), inbound_).receive(count);
  for (const Transfer& transfer : sent) EXPECT_TRUE(transfer.wait()) << transfer.status().to_string();
}

TEST_P(MessageTest, WaitingMessagesDoNotHoldUpTransfers) {
  const Region theirs = target().allocate("kv", mib).value();
  const Region ours = engine().allocate("local", mib).value();
  fill(theirs.bytes(), 3);
  const std::vector<std::byte> untaken(most);
  for (int i = 0; i < 200; ++i) send(untaken);
  const Slice all{0, 0, mib};
  const Status status = engine().read(faulty_.pair.peer, ours, "kv", {&all, 1}, {.deadline = slow(3s)}).wait();
  EXPECT_TRUE(status) << status.to_string();
  EXPECT_EQ(wrong_bytes(ours.bytes(), 3), 0u);
}

// ---------------------------------------------------------------- notifications

TEST_P(MessageTest, NotificationsComeOnceAcrossRetriesAndAfterTheirData) {
  constexpr std::uint32_t count = 2000;
  constexpr std::uint32_t part = 500;
  constexpr std::uint64_t share = 4 * kib;
  const Region theirs = target().allocate("kv", count * share).value();
  const Region ours = engine().allocate("local", count * share).value();
  fill(ours.bytes(), 4);
  std::vector<Transfer> sent;
  for (std::uint32_t i = 0; i < count; ++i) {
    const Slice slice{i * share, i * share, share};
    sent.push_back(engine().write_imm(faulty_.pair.peer, ours, "kv", {&slice, 1}, i));
  }
  std::vector<int> seen(count);
  std::size_t early = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    if (i % part == part - 1) lose_the_rail();
    const auto notification = target().next_notification(slow(10s));
    ASSERT_TRUE(notification) << i << " have come: " << notification.status().to_string();
    ASSERT_LT(notification->immediate, count);
    ++seen[notification->immediate];
    const std::uint64_t place = notification->immediate * share;
    early += wrong_bytes(theirs.bytes().subspan(place, share), 4, place) != 0;
  }
  for (const Transfer& transfer : sent) EXPECT_TRUE(transfer.wait()) << transfer.status().to_string();
  EXPECT_EQ(early, 0u) << "notifications that came before their data";
  EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), count);
  EXPECT_EQ(target().next_notification(100ms).status().code(), Errc::timed_out) << "one came twice";
}

TEST_P(MessageTest, ALargeWriteNotifiesOnceAfterAllOfIt) {
  const Region theirs = target().allocate("kv", 32 * mib).value();
  const Region ours = engine().allocate("local", 32 * mib).value();
  for (std::uint32_t round = 1; round <= 4; ++round) {
    fill(ours.bytes(), round);
    const Slice all{0, 0, 32 * mib};
    if (round > 2) faulty_.plan->fail_items = 3;
    const Transfer transfer = engine().write_imm(faulty_.pair.peer, ours, "kv", {&all, 1}, round);
    EXPECT_EQ(target().next_notification(slow(10s)).value().immediate, round);
    EXPECT_EQ(wrong_bytes(theirs.bytes(), round), 0u);
    EXPECT_TRUE(transfer.wait()) << transfer.status().to_string();
  }
  EXPECT_EQ(target().next_notification(50ms).status().code(), Errc::timed_out);
}

}  // namespace
}  // namespace kvferry::test
