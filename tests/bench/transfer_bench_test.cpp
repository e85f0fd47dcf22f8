// transfer_bench from the outside: what it prints, how it ends, what it leaves behind.
#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <nlohmann/json.hpp>
#include <sys/socket.h>
#include <unistd.h>

#include "program.hpp"

namespace {

using namespace std::chrono_literals;
using kvferry::test::is_running;
using kvferry::test::Outcome;
using kvferry::test::Program;
using Json = nlohmann::json;

std::vector<std::string> command(std::vector<std::string> flags) {
  flags.insert(flags.begin(), KVFERRY_TRANSFER_BENCH);
  return flags;
}

Outcome bench(std::vector<std::string> flags) { return kvferry::test::run(command(std::move(flags))); }

std::vector<Json> json_lines(const std::string& text) {
  std::vector<Json> rows;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) rows.push_back(Json::parse(line));
  return rows;
}

// ---- rows

class EveryOperation : public testing::TestWithParam<std::tuple<const char*, const char*>> {};

TEST_P(EveryOperation, IsMeasuredAndVerified) {
  const auto [transport, op] = GetParam();
  const auto outcome =
      bench({std::string("--transport=") + transport, std::string("--op=") + op, "--block-size=4K,5000",
             "--batch-size=1,7", "--duration=0.05", "--rounds=2", "--output=json", "--floor"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.errors;
  const auto rows = json_lines(outcome.output);
  ASSERT_EQ(rows.size(), 4u);
  for (const Json& row : rows) {
    EXPECT_EQ(row["transport"], transport);
    EXPECT_EQ(row["op"], op);
    EXPECT_EQ(row["verified"], true);
    EXPECT_EQ(row["concurrency"], 1);
    EXPECT_GT(row["trips"], 0);
    EXPECT_GT(row["latency_p50_us"], 0);
    EXPECT_LE(row["latency_p50_us"], row["latency_p99_us"]);
    EXPECT_GT(row["latency_avg_us"], 0);
    EXPECT_GT(row["mib_per_s"], 0);
    EXPECT_GT(row["ops_per_s"], 0);
    EXPECT_GT(row["floor_ratio"], 0);
  }
}

INSTANTIATE_TEST_SUITE_P(TransferBench, EveryOperation,
                         testing::Combine(testing::Values("tcp", "shm"),
                                          testing::Values("read", "write", "write_imm", "sendrecv")),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param)) + "_" + std::get<1>(info.param);
                         });

TEST(TransferBench, SeveralTransfersInFlightAreVerifiedToo) {
  for (const char* op : {"read", "write", "sendrecv"}) {
    const auto outcome = bench({std::string("--op=") + op, "--block-size=8K", "--batch-size=5", "--concurrency=6",
                                "--iterations=60", "--output=json"});
    ASSERT_EQ(outcome.exit_code, 0) << outcome.errors;
    const auto rows = json_lines(outcome.output);
    ASSERT_EQ(rows.size(), 1u);
    EXPECT_EQ(rows[0]["verified"], true);
    EXPECT_EQ(rows[0]["concurrency"], 6);
    EXPECT_EQ(rows[0]["trips"], 60);
  }
}

TEST(TransferBench, IterationsAreCounted) {
  const auto outcome =
      bench({"--op=read", "--block-size=4K", "--batch-size=3", "--iterations=7", "--rounds=3", "--output=json"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.errors;
  EXPECT_EQ(json_lines(outcome.output).at(0)["trips"], 7);
}

TEST(TransferBench, PatternsAndRailsWork) {
  for (const char* pattern : {"contiguous", "strided", "random"}) {
    const auto outcome = bench({"--transport=tcp", "--num-rails=2", std::string("--pattern=") + pattern,
                                "--block-size=64K", "--batch-size=33", "--iterations=5", "--output=json"});
    ASSERT_EQ(outcome.exit_code, 0) << outcome.errors;
    for (const Json& row : json_lines(outcome.output)) {
      EXPECT_EQ(row["verified"], true);
      EXPECT_EQ(row["pattern"], pattern);
      EXPECT_EQ(row["num_rails"], 2);
    }
  }
}

TEST(TransferBench, TextAndCsvComeWithAHeader) {
  const auto text = bench({"--op=read", "--block-size=4K", "--batch-size=1", "--iterations=3"});
  ASSERT_EQ(text.exit_code, 0) << text.errors;
  EXPECT_EQ(std::count(text.output.begin(), text.output.end(), '\n'), 3);
  EXPECT_NE(text.output.find("p99"), std::string::npos);
  const auto csv = bench({"--op=read", "--block-size=4K", "--batch-size=1", "--iterations=3", "--output=csv"});
  ASSERT_EQ(csv.exit_code, 0) << csv.errors;
  EXPECT_TRUE(csv.output.starts_with("transport,op,block_size,batch_size,")) << csv.output;
  EXPECT_TRUE(csv.output.ends_with(",true\n")) << csv.output;
}

TEST(TransferBench, WithoutVerifyNothingIsClaimed) {
  const auto outcome =
      bench({"--op=read", "--block-size=4K", "--batch-size=1", "--iterations=3", "--noverify", "--output=json"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.errors;
  EXPECT_TRUE(json_lines(outcome.output).at(0)["verified"].is_null());
}

TEST(TransferBench, ProgressGoesToStandardError) {
  const auto outcome = bench({"--op=read", "--block-size=4K", "--batch-size=1", "--iterations=4", "--rounds=2",
                              "--progress", "--output=json"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.errors;
  EXPECT_NE(outcome.errors.find("round 2 of 2"), std::string::npos) << outcome.errors;
  EXPECT_EQ(json_lines(outcome.output).size(), 1u);
}

// ---- two commands

TEST(TransferBench, OneTargetServesSeveralInitiators) {
  Program target(command({"--mode=target", "--transport=tcp"}));
  const std::string prefix = "transfer_bench target at ";
  const std::string line = target.wait_for_line(prefix, 20s);
  ASSERT_FALSE(line.empty());
  for (int i = 0; i < 2; ++i) {
    const auto outcome =
        bench({"--mode=initiator", "--remote-endpoint=" + line.substr(prefix.size()), "--transport=tcp",
               "--op=read,write_imm", "--block-size=16K", "--batch-size=9", "--iterations=20", "--output=json"});
    ASSERT_EQ(outcome.exit_code, 0) << outcome.errors;
    for (const Json& row : json_lines(outcome.output)) EXPECT_EQ(row["verified"], true);
  }
  target.signal(SIGTERM);
  EXPECT_EQ(target.finish(10s).exit_code, 0);
}

TEST(TransferBench, ATargetThatIsNotThereIsAnErrorWithinTheConnectTimeout) {
  const auto outcome = bench({"--mode=initiator", "--remote-endpoint=tcp://127.0.0.1:9"});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_NE(outcome.errors.find("127.0.0.1:9"), std::string::npos) << outcome.errors;
  EXPECT_LT(outcome.taken, 15s);
}

TEST(TransferBench, ANameThatDoesNotResolveIsAnError) {
  const auto outcome = bench({"--mode=initiator", "--remote-endpoint=tcp://no-such-host.invalid:7000"});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_NE(outcome.errors.find("no-such-host.invalid"), std::string::npos) << outcome.errors;
}

TEST(TransferBench, APortInUseIsAnErrorThatNamesIt) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  ASSERT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(::listen(fd, 1), 0);
  ASSERT_EQ(::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size), 0);
  const std::string port = std::to_string(ntohs(address.sin_port));
  const auto outcome = bench({"--mode=target", "--local-endpoint=tcp://127.0.0.1:" + port});
  ::close(fd);
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_NE(outcome.errors.find(port), std::string::npos) << outcome.errors;
  EXPECT_NE(outcome.errors.find("address_in_use"), std::string::npos) << outcome.errors;
}

TEST(TransferBench, ATargetThatDiesEndsTheInitiatorWithAnError) {
  Program target(command({"--mode=target"}));
  const std::string prefix = "transfer_bench target at ";
  const std::string line = target.wait_for_line(prefix, 20s);
  ASSERT_FALSE(line.empty());
  Program initiator(command({"--mode=initiator", "--remote-endpoint=" + line.substr(prefix.size()), "--op=read",
                             "--block-size=4K", "--batch-size=160", "--duration=60", "--output=csv"}));
  ASSERT_FALSE(initiator.wait_for_line("transport,", 20s).empty());
  std::this_thread::sleep_for(300ms);
  target.signal(SIGKILL);
  const auto outcome = initiator.finish(20s);
  EXPECT_EQ(outcome.exit_code, 1) << outcome.errors;
  EXPECT_NE(outcome.errors.find("lost"), std::string::npos) << outcome.errors;
}

// ---- ends

TEST(TransferBench, AnInterruptEndsBothProcesses) {
  Program both(command({"--op=read", "--block-size=4K", "--batch-size=160", "--duration=60", "--output=csv"}));
  ASSERT_FALSE(both.wait_for_line("transport,", 20s).empty());
  const auto children = both.children();
  ASSERT_EQ(children.size(), 1u);
  std::this_thread::sleep_for(500ms);  // into the row's trips
  both.signal(SIGINT);
  const auto outcome = both.finish(20s);
  EXPECT_EQ(outcome.exit_code, 130) << outcome.errors;
  EXPECT_NE(outcome.output.find(",read,4096,160,"), std::string::npos) << "the row begun is still printed";
  EXPECT_FALSE(is_running(children[0]));
}

TEST(TransferBench, TheTargetDoesNotOutliveAKilledParent) {
  Program both(command({"--op=read", "--block-size=4K", "--batch-size=160", "--duration=60", "--output=csv"}));
  ASSERT_FALSE(both.wait_for_line("transport,", 20s).empty());
  const auto children = both.children();
  ASSERT_EQ(children.size(), 1u);
  both.signal(SIGKILL);
  (void)both.finish(5s);
  const auto give_up = std::chrono::steady_clock::now() + 5s;
  while (is_running(children[0]) && std::chrono::steady_clock::now() < give_up) std::this_thread::sleep_for(10ms);
  EXPECT_FALSE(is_running(children[0]));
}

// ---- flags

TEST(TransferBench, WrongFlagsEndWith2AndNameTheFlag) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"--mode=server"}, "--mode"},
      {{"--transport=cuda"}, "--transport"},
      {{"--transport=verbs", "--floor"}, "--floor"},
      {{"--block-size=many"}, "--block-size"},
      {{"--batch-size=0"}, "--batch-size"},
      {{"--concurrency=0"}, "--concurrency"},
      {{"--transport=tcp", "--device-name=eth0"}, "--device-name"},
      {{"--mode=initiator"}, "--remote-endpoint"},
      {{"--duration=soon"}, "duration"},
      {{"--iterations=1.5"}, "iterations"},
      {{"--verify=perhaps"}, "verify"},
      {{"--no-such-flag=1"}, "no"},
      {{"read"}, "'read'"},
  };
  for (const auto& [flags, named] : cases) {
    const auto outcome = bench(flags);
    EXPECT_EQ(outcome.exit_code, 2) << flags[0] << ": " << outcome.errors;
    EXPECT_NE(outcome.errors.find(named), std::string::npos) << flags[0] << ": " << outcome.errors;
    EXPECT_EQ(outcome.output, "") << flags[0];
  }
}

TEST(TransferBench, HelpListsTheFlagsAndSucceeds) {
  const auto outcome = bench({"--help"});
  EXPECT_EQ(outcome.exit_code, 0);
  for (const char* flag : {"block_size", "remote_endpoint", "ttft_ms", "Exit status"}) {
    EXPECT_NE(outcome.output.find(flag), std::string::npos) << flag;
  }
}

// ---- traces

struct Replay {
  const char* model;
  int requests;
  const char* prefill_pool;
  const char* decode_cache;
  bool skips;  ///< the cache is large enough to hold what requests have in common
};

TEST(TransferBench, ReplaysTheSyntheticTraceForEveryModel) {
  // Of the large models only its beginning, in pools of a few blocks: the whole would be gigabytes.
  const Replay replays[] = {{"llama-3.1-8b", 2, "64M", "256M", true},
                            {"llama-3.1-70b-tp8", 8, "64M", "192M", true},
                            {"qwen3-32b", 1, "128M", "128M", false},
                            {"deepseek-v3", 2, "64M", "192M", true}};
  for (const Replay& replay : replays) {
    const auto outcome = bench({"--trace=" KVFERRY_SYNTHETIC_TRACE, std::string("--model=") + replay.model, "--speed=0",
                                "--trace-requests=" + std::to_string(replay.requests),
                                std::string("--prefill-pool=") + replay.prefill_pool,
                                std::string("--decode-cache=") + replay.decode_cache, "--output=json"});
    ASSERT_EQ(outcome.exit_code, 0) << outcome.errors;
    const auto rows = json_lines(outcome.output);
    ASSERT_EQ(rows.size(), 1u);
    EXPECT_EQ(rows[0]["model"], replay.model);
    EXPECT_EQ(rows[0]["requests"], replay.requests);
    EXPECT_EQ(rows[0]["verified"], true);
    EXPECT_EQ(rows[0]["skipped_share"] > 0.2, replay.skips) << rows[0];
    EXPECT_LT(rows[0]["skipped_share"], 0.9);
    EXPECT_GT(rows[0]["bytes"], 0);
    EXPECT_LE(rows[0]["latency_p50_us"], rows[0]["latency_max_us"]);
  }
}

TEST(TransferBench, ATraceIsPacedByItsTimestamps) {
  const auto outcome = bench({"--trace=" KVFERRY_SYNTHETIC_TRACE, "--model=llama-3.1-70b-tp8", "--speed=0.5",
                              "--trace-requests=4", "--prefill-pool=64M", "--decode-cache=64M"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.errors;
  EXPECT_NE(outcome.output.find("under 5 % of TTFT"), std::string::npos) << outcome.output;
  // The fourth request comes 720 ms after the first, at half the speed.
  EXPECT_GT(outcome.taken, 1440ms);
}

TEST(TransferBench, AWrongLineOfATraceIsNamed) {
  const auto file = std::filesystem::temp_directory_path() / ("kvferry_trace_" + std::to_string(::getpid()));
  std::FILE* out = std::fopen(file.c_str(), "w");
  ASSERT_NE(out, nullptr);
  std::fputs("{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [1]}\nnonsense\n", out);
  std::fclose(out);
  const auto outcome = bench({"--trace=" + file.string()});
  std::filesystem::remove(file);
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_NE(outcome.errors.find(file.string() + ":2"), std::string::npos) << outcome.errors;
}

TEST(TransferBench, ReplaysThePublicTraceWhenItIsThere) {
  const char* named = std::getenv("KVFERRY_TRACE");
  const std::string file = named ? named : KVFERRY_PUBLIC_TRACE;
  if (!std::filesystem::exists(file)) GTEST_SKIP() << file << " is not there; set KVFERRY_TRACE to try it";
  const auto outcome = bench({"--trace=" + file, "--model=llama-3.1-70b-tp8", "--speed=0", "--trace-requests=3",
                              "--prefill-pool=256M", "--decode-cache=256M", "--output=json"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.errors;
  EXPECT_EQ(json_lines(outcome.output).at(0)["verified"], true);
}

// ---- examples

const std::array examples = {KVFERRY_EXAMPLE_READ, KVFERRY_EXAMPLE_WRITE, KVFERRY_EXAMPLE_MESSAGES,
                             KVFERRY_EXAMPLE_FORMS};

TEST(Examples, RunOnTheirOwnAndCheckWhatTheyMoved) {
  for (const std::string example : examples) {
    const auto outcome = kvferry::test::run({example});
    EXPECT_EQ(outcome.exit_code, 0) << example << ": " << outcome.errors;
    EXPECT_FALSE(outcome.output.empty()) << example;
  }
}

TEST(Examples, ServeAndConnectAreTwoCommands) {
  for (const std::string example : examples) {
    Program server({example, "--serve"});
    const std::string prefix = "serving at ";
    const std::string line = server.wait_for_line(prefix, 20s);
    ASSERT_FALSE(line.empty()) << example;
    const auto outcome = kvferry::test::run({example, "--connect", line.substr(prefix.size())});
    EXPECT_EQ(outcome.exit_code, 0) << example << ": " << outcome.errors;
    EXPECT_EQ(server.finish(10s).exit_code, 0) << example;
  }
}

TEST(Examples, AWrongAddressIsAnErrorAndNoHang) {
  const auto outcome = kvferry::test::run({KVFERRY_EXAMPLE_READ, "--connect", "tcp://127.0.0.1:9"});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_NE(outcome.errors.find("127.0.0.1:9"), std::string::npos) << outcome.errors;
}

}  // namespace
