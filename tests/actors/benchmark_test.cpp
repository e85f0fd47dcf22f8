#include <atomic>
#include <thread>

#include <gtest/gtest.h>

#include <kvferry/actors/benchmark.hpp>

namespace kvferry {
namespace {

using namespace std::chrono_literals;

struct CountingJob final : BenchmarkJob {
  explicit CountingJob(int last_step, Status end = {}) : last(last_step), error(std::move(end)) {}
  Result<bool> step() override {
    ++count;
    if (count < last) {
      std::this_thread::sleep_for(100us);
      return true;
    }
    if (!error.is_ok()) return error;
    return false;
  }
  std::atomic<int> count{0};
  const int last;
  const Status error;
};

TEST(BenchmarkActorTest, RunsEveryStepAndReportsTheEnd) {
  CountingJob job(5);
  BenchmarkActorHandle handle(job);
  EXPECT_TRUE(handle.wait(10s).is_ok());
  EXPECT_EQ(job.count, 5);
  EXPECT_EQ(handle.steps(), 5u);
}

TEST(BenchmarkActorTest, AnErrorEndsTheJobWithItsText) {
  CountingJob job(2, {Errc::peer_lost, "gone"});
  BenchmarkActorHandle handle(job);
  const Status outcome = handle.wait(10s);
  EXPECT_EQ(outcome.code(), Errc::peer_lost);
  EXPECT_EQ(outcome.text(), "gone");
}

TEST(BenchmarkActorTest, StopsBetweenTwoSteps) {
  CountingJob job(1'000'000);
  BenchmarkActorHandle handle(job);
  EXPECT_EQ(handle.wait(5ms).code(), Errc::timed_out);
  handle.stop();
  EXPECT_EQ(handle.wait(10s).code(), Errc::cancelled);
  EXPECT_LT(job.count, 1'000'000);
}

TEST(BenchmarkActorTest, DestructionStopsARunningJob) {
  CountingJob job(1'000'000);
  { BenchmarkActorHandle handle(job); }
  const int count = job.count;
  std::this_thread::sleep_for(5ms);
  EXPECT_EQ(job.count, count);
}

}  // namespace
}  // namespace kvferry
