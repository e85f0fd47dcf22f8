// Deadlines and cancels over a transport that is late: the end comes on time, and then nothing moves.
#include <cstring>
#include <optional>
#include <thread>

#include "tests/e2e/engines.hpp"

namespace kvferry::test {
namespace {

/// What makes the transport late, and whether it can be told to stop.
struct Lateness {
  const char* name;
  bool bytes_late;  ///< the bytes move late; otherwise they move at once and only their completion is late
  bool ignore_cancel;
};

/// One transfer over a late transport of its own, and the memory it works on.
class LateTransfer {
 public:
  static constexpr std::uint64_t bytes = 4 * mib;

  LateTransfer(const std::string& transport, const Lateness& late, Op op, std::chrono::microseconds by)
      : faulty_(transport), op_(op) {
    fill(theirs_.bytes(), 1);
    fill(ours_.bytes(), 2);
    faulty_.plan->ignore_cancel = late.ignore_cancel;
    (late.bytes_late ? faulty_.plan->delay_us : faulty_.plan->completion_delay_us) = by.count();
  }

  Transfer begin(TransferOptions options) {
    const Slice all{0, 0, bytes};
    Engine& engine = faulty_.pair.initiator;
    return op_ == Op::read ? engine.read(faulty_.pair.peer, ours_, "kv", {&all, 1}, options)
                           : engine.write(faulty_.pair.peer, ours_, "kv", {&all, 1}, options);
  }

  bool is_under_way() const {
    return eventually(slow(5s), [&] { return faulty_.plan->items > 0; });
  }

  /// From here on nothing may move. A late write would be seen by what it carries.
  void watch() {
    if (op_ == Op::write) std::memset(ours_.data(), 0xdd, ours_.size());
    here_.emplace(ours_.bytes());
    there_.emplace(theirs_.bytes());
  }
  void expect_quiet() const {
    EXPECT_EQ(here_->changed_bytes(), 0u) << "local memory moved after the end of a " << to_string(op_);
    EXPECT_EQ(there_->changed_bytes(), 0u) << "remote memory moved after the end of a " << to_string(op_);
  }

 private:
  FaultyPair faulty_;
  Op op_;
  Region theirs_ = faulty_.pair.target.allocate("kv", bytes).value();
  Region ours_ = faulty_.pair.initiator.allocate("local", bytes).value();
  std::optional<Snapshot> here_;
  std::optional<Snapshot> there_;
};

class DeadlineTest : public ::testing::TestWithParam<std::tuple<const char*, Lateness>> {
 protected:
  LateTransfer late(Op op) const { return {std::get<0>(GetParam()), std::get<1>(GetParam()), op, late_by_}; }

  /// Far less than the transport takes.
  void expect_ends_soon(const Transfer& transfer, Errc code) const {
    ASSERT_TRUE(transfer.wait_for(late_by_ / 2)) << "it must not wait for the transport";
    EXPECT_EQ(transfer.status().code(), code) << transfer.status().to_string();
    EXPECT_NE(transfer.status().text().find("target"), std::string_view::npos) << transfer.status().text();
  }

  const std::chrono::milliseconds late_by_ = slow(500ms);
};

INSTANTIATE_TEST_SUITE_P(, DeadlineTest,
                         ::testing::Combine(each_transport(),
                                            ::testing::Values(Lateness{"LateBytes", true, false},
                                                              Lateness{"LateBytesDeafToCancel", true, true},
                                                              Lateness{"LateCompletions", false, false},
                                                              Lateness{"LateCompletionsDeafToCancel", false, true})),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param)) + "_" + std::get<1>(info.param).name;
                         });

TEST_P(DeadlineTest, EndsOnTimeAndQuietAndSoDoesCancel) {
  LateTransfer read = late(Op::read);
  LateTransfer write = late(Op::write);
  LateTransfer cancelled_read = late(Op::read);
  LateTransfer cancelled_write = late(Op::write);

  for (LateTransfer* each : {&read, &write}) {
    const TimePoint start = Clock::now();
    const Transfer transfer = each->begin({.deadline = 50ms});
    expect_ends_soon(transfer, Errc::timed_out);
    EXPECT_GE(Clock::now() - start, 50ms);
    each->watch();
  }
  for (LateTransfer* each : {&cancelled_read, &cancelled_write}) {
    const Transfer transfer = each->begin({});
    ASSERT_TRUE(each->is_under_way());
    ASSERT_FALSE(transfer.done());
    transfer.cancel();
    expect_ends_soon(transfer, Errc::cancelled);
    each->watch();
  }
  std::this_thread::sleep_for(2 * late_by_);
  for (const LateTransfer* each : {&read, &write, &cancelled_read, &cancelled_write}) each->expect_quiet();
}

class FenceTest : public ::testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(, FenceTest, each_transport(), transport_name);

TEST_P(FenceTest, OthersOnTheFencedRailAreCarriedOn) {
  FaultyPair faulty(GetParam());
  Engine& engine = faulty.pair.initiator;
  const Region theirs = faulty.pair.target.allocate("kv", 4 * mib).value();
  const Region ours = engine.allocate("local", 4 * mib).value();
  fill(ours.bytes(), 3);
  faulty.plan->ignore_cancel = true;
  faulty.plan->delay_us = std::chrono::microseconds(slow(300ms)).count();
  const Slice first{0, 0, 2 * mib};
  const Slice second{2 * mib, 2 * mib, 2 * mib};
  const Transfer hasty = engine.write(faulty.pair.peer, ours, "kv", {&first, 1}, {.deadline = 30ms});
  const Transfer patient = engine.write(faulty.pair.peer, ours, "kv", {&second, 1});
  EXPECT_EQ(hasty.wait().code(), Errc::timed_out);
  EXPECT_TRUE(patient.wait()) << patient.status().to_string();
  EXPECT_EQ(wrong_bytes(theirs.bytes().subspan(2 * mib), 3, 2 * mib), 0u);
  EXPECT_GE(faulty.plan->fences, 1u);
  EXPECT_GE(counter(engine, "fences"), 1u);
  EXPECT_GE(counter(engine, "items_retried"), 1u);
}

TEST_P(FenceTest, AFencedWayIsUsedAgain) {
  FaultyPair faulty(GetParam());
  Engine& engine = faulty.pair.initiator;
  const Region theirs = faulty.pair.target.allocate("kv", mib).value();
  const Region ours = engine.allocate("local", mib).value();
  fill(theirs.bytes(), 4);
  const Slice all{0, 0, mib};
  faulty.plan->ignore_cancel = true;
  for (int round = 0; round < 3; ++round) {
    faulty.plan->delay_us = std::chrono::microseconds(10s).count();
    EXPECT_EQ(engine.read(faulty.pair.peer, ours, "kv", {&all, 1}, {.deadline = 20ms}).wait().code(), Errc::timed_out);
    faulty.plan->delay_us = 0;
    std::memset(ours.data(), 0, ours.size());
    const Status status = engine.read(faulty.pair.peer, ours, "kv", {&all, 1}).wait();
    EXPECT_TRUE(status) << status.to_string();
    EXPECT_EQ(wrong_bytes(ours.bytes(), 4), 0u);
  }
}

// Unlike the fault transport, which forgets what it holds, the real ones must stop in the middle.
TEST_P(FenceTest, DeadlinesInTheMiddleOfRealWorkLeaveMemoryQuiet) {
  Pair pair{std::string(GetParam())};
  const Region theirs = pair.target.allocate("kv", 32 * mib).value();
  const Region ours = pair.initiator.allocate("local", 32 * mib).value();
  const auto slices = shuffled_slices(8192, 4 * kib, 5);
  int in_the_middle = 0;
  for (int round = 0; round < 12; ++round) {
    const bool reading = round % 2 == 0;
    const Region& to = reading ? ours : theirs;
    std::memset((reading ? theirs : ours).data(), 0x11 + round, theirs.size());
    std::memset(to.data(), 0, to.size());
    const TransferOptions options{.deadline = std::chrono::milliseconds(1 + round / 2)};
    const Transfer transfer = reading ? pair.initiator.read(pair.peer, ours, "kv", slices, options)
                                      : pair.initiator.write(pair.peer, ours, "kv", slices, options);
    ASSERT_TRUE(transfer.wait_for(slow(1s)));
    if (transfer.status().is_ok()) continue;
    ASSERT_EQ(transfer.status().code(), Errc::timed_out) << transfer.status().to_string();
    ++in_the_middle;
    const Snapshot there(to.bytes());
    std::memset((reading ? theirs : ours).data(), 0xdd, theirs.size());
    std::this_thread::sleep_for(30ms);
    ASSERT_EQ(there.changed_bytes(), 0u) << "memory moved after the end in round " << round;
  }
  EXPECT_GE(in_the_middle, 1);
}

}  // namespace
}  // namespace kvferry::test
