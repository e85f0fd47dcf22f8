#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <kvferry/runtime/log.hpp>

namespace kvferry {
namespace {

class Logs : public ::testing::Test {
 protected:
  void SetUp() override {
    set_log_sink([this](LogLevel level, std::string_view line) { lines_.emplace_back(level, line); });
  }
  void TearDown() override {
    set_log_sink({});
    set_log_level(LogLevel::warning);
  }

  std::vector<std::pair<LogLevel, std::string>> lines_;
};

TEST_F(Logs, WritesWhatIsEnabled) {
  set_log_level(LogLevel::info);
  EXPECT_EQ(log_level(), LogLevel::info);
  log(LogLevel::debug, "hidden");
  log(LogLevel::info, "first");
  log(LogLevel::error, "second");
  EXPECT_EQ(lines_, (decltype(lines_){{LogLevel::info, "first"}, {LogLevel::error, "second"}}));
}

TEST_F(Logs, OffWritesNothing) {
  set_log_level(LogLevel::off);
  log(LogLevel::error, "hidden");
  log(LogLevel::off, "hidden");
  EXPECT_TRUE(lines_.empty());
}

TEST_F(Logs, LinesAreTakenAsTheyAre) {
  log(LogLevel::error, "braces {} and %s stay");
  ASSERT_EQ(lines_.size(), 1u);
  EXPECT_EQ(lines_[0].second, "braces {} and %s stay");
}

TEST_F(Logs, StandardErrorLinesArePrefixed) {
  set_log_sink({});
  ::testing::internal::CaptureStderr();
  log(LogLevel::warning, "a rail {} cools down");
  const std::string written = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(written.rfind("kvferry ", 0), 0u) << written;
  EXPECT_NE(written.find(" warning: a rail {} cools down\n"), std::string::npos) << written;
}

TEST_F(Logs, ManyThreadsAndAChangingSink) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([] {
      for (int i = 0; i < 500; ++i) log(LogLevel::error, "line");
    });
  std::size_t counted = 0;
  for (int i = 0; i < 100; ++i) set_log_sink([&counted](LogLevel, std::string_view line) { counted += line.size(); });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(counted % 4, 0u);
  EXPECT_EQ(lines_.size() + counted / 4, 1500u);
}

}  // namespace
}  // namespace kvferry
