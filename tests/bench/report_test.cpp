// Formats of the results, and the messages by which both sides agree.
#include "bench/report.hpp"

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "bench/control.hpp"
#include "bench/floor_service.hpp"

namespace kvferry::bench {
namespace {

CaseResult some_result() {
  CaseResult result;
  result.bench_case = {BenchOp::write, {Pattern::random, 4096, 160, 2, 1}};
  result.transport = "tcp";
  result.trips = 1000;
  result.seconds = 0.5;
  result.average_us = 500.1234;
  result.p50_us = 490;
  result.p99_us = 900;
  result.verified = true;
  return result;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

TEST(Report, JsonIsOneObjectALine) {
  const std::string text = sweep_row(Output::json, some_result());
  ASSERT_EQ(lines_of(text).size(), 1u);
  const auto json = nlohmann::json::parse(text);
  EXPECT_EQ(json["transport"], "tcp");
  EXPECT_EQ(json["op"], "write");
  EXPECT_EQ(json["block_size"], 4096);
  EXPECT_EQ(json["batch_size"], 160);
  EXPECT_EQ(json["concurrency"], 2);
  EXPECT_EQ(json["trips"], 1000);
  EXPECT_EQ(json["latency_avg_us"], 500.123);
  EXPECT_EQ(json["latency_p50_us"], 490);
  EXPECT_EQ(json["latency_p99_us"], 900);
  EXPECT_EQ(json["mib_per_s"], 1250);
  EXPECT_EQ(json["ops_per_s"], 320'000);
  EXPECT_TRUE(json["floor_ratio"].is_null());
  EXPECT_EQ(json["verified"], true);
  EXPECT_EQ(sweep_header(Output::json), "");
}

TEST(Report, TheFloorAppearsWhenItWasMeasured) {
  CaseResult result = some_result();
  result.floor_ratio = 0.9371;
  result.floor_p50_us = 459.2;
  result.floor_name = "polled";
  const auto json = nlohmann::json::parse(sweep_row(Output::json, result));
  EXPECT_DOUBLE_EQ(json["floor_ratio"].get<double>(), 0.9371);
  EXPECT_EQ(json["floor_p50_us"], 459.2);
  EXPECT_EQ(json["floor"], "polled");
  EXPECT_NE(sweep_row(Output::text, result).find("0.94"), std::string::npos);
}

TEST(Report, VerifiedIsNullWhenNotAskedForAndFalseWhenWrong) {
  CaseResult result = some_result();
  result.verified = std::nullopt;
  EXPECT_TRUE(nlohmann::json::parse(sweep_row(Output::json, result))["verified"].is_null());
  result.verified = false;
  EXPECT_EQ(nlohmann::json::parse(sweep_row(Output::json, result))["verified"], false);
  EXPECT_NE(sweep_row(Output::text, result).find("NO"), std::string::npos);
}

TEST(Report, CsvHasTheNamedColumns) {
  EXPECT_EQ(sweep_header(Output::csv),
            "transport,op,block_size,batch_size,concurrency,trips,latency_avg_us,latency_p50_us,latency_p99_us,"
            "mib_per_s,ops_per_s,floor_ratio,verified\n");
  EXPECT_EQ(sweep_row(Output::csv, some_result()),
            "tcp,write,4096,160,2,1000,500.123,490.0,900.0,1250.0,320000.0,,true\n");
}

TEST(Report, TextRowsStandUnderTheirHeader) {
  const auto header = lines_of(sweep_header(Output::text));
  const auto row = lines_of(sweep_row(Output::text, some_result()));
  ASSERT_EQ(header.size(), 2u);
  ASSERT_EQ(row.size(), 1u);
  EXPECT_EQ(header[0].size(), row[0].size());
  EXPECT_EQ(header[1].size(), row[0].size());
  EXPECT_NE(row[0].find("625.0"), std::string::npos) << "transferred MiB: " << row[0];
}

TraceResult some_trace() {
  TraceResult result;
  result.options = {"a.jsonl", *find_model("deepseek-v3"), 2, 0, 0, 1, 1, 200, 40};
  result.transport = "shm";
  result.requests = 4;
  result.fully_cached = 1;
  result.bytes = 3 << 20;
  result.bytes_skipped = 1 << 20;
  result.under_budget = 3;
  result.verified = true;
  for (const std::uint64_t us : {100, 200, 300}) result.latency.record(us * 1000);
  return result;
}

TEST(Report, ATraceGivesOneJsonObject) {
  const auto json = nlohmann::json::parse(trace_report(Output::json, some_trace()));
  EXPECT_EQ(json["model"], "deepseek-v3");
  EXPECT_EQ(json["requests"], 4);
  EXPECT_EQ(json["bytes"], 3 << 20);
  EXPECT_EQ(json["skipped_share"], 0.25);
  EXPECT_NEAR(json["latency_p50_us"].get<double>(), 200, 1);
  EXPECT_NEAR(json["latency_max_us"].get<double>(), 300, 1);
  EXPECT_EQ(json["share_under_5_percent_of_ttft"], 0.75);
  EXPECT_EQ(json["verified"], true);
}

TEST(Report, ATraceAsCsvHasAsManyValuesAsColumns) {
  const auto lines = lines_of(trace_report(Output::csv, some_trace()));
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(std::count(lines[0].begin(), lines[0].end(), ','), std::count(lines[1].begin(), lines[1].end(), ','));
}

TEST(Control, MessagesSurviveTheWay) {
  const Json message = {{"type", "fill"}, {"round", 7}, {"workload", to_json(some_result().bench_case.workload)}};
  const auto back = decode(encode(message));
  ASSERT_TRUE(back.is_ok()) << back.status().to_string();
  EXPECT_EQ(*back, message);
  const auto workload = workload_from((*back)["workload"]);
  ASSERT_TRUE(workload.is_ok()) << workload.status().to_string();
  EXPECT_EQ(workload->block_size, 4096u);
  EXPECT_EQ(workload->parts, 2u);
}

TEST(Control, DamagedMessagesAreErrors) {
  auto bytes = encode({{"type", "fill"}, {"round", 7}});
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(decode(std::span(bytes).first(length)).is_ok()) << length;
  }
  EXPECT_FALSE(decode(encode(Json::array({1, 2}))).is_ok());
}

TEST(Control, WorkloadsThatCannotBeAreRefused) {
  const Json good = to_json(some_result().bench_case.workload);
  for (const char* field : {"pattern", "block_size", "batch_size", "parts", "seed"}) {
    Json bad = good;
    bad.erase(field);
    EXPECT_FALSE(workload_from(bad).is_ok()) << field;
    bad[field] = -1;
    EXPECT_FALSE(workload_from(bad).is_ok()) << field;
  }
  Json huge = good;
  huge["block_size"] = std::uint64_t{1} << 60;
  EXPECT_FALSE(workload_from(huge).is_ok());
}

TEST(Control, FloorRequestsSurviveTheWayAndAreChecked) {
  const FloorRequest request{"tcp", BenchOp::read, some_result().bench_case.workload, 4, RawMode::polled, 1 << 20};
  const auto back = floor_request_from(*decode(encode(to_json(request))));
  ASSERT_TRUE(back.is_ok()) << back.status().to_string();
  EXPECT_EQ(back->sockets, 4u);
  EXPECT_EQ(back->mode, RawMode::polled);
  EXPECT_EQ(back->buffer_bytes, 1 << 20);
  for (const auto& [field, value] : std::vector<std::pair<const char*, Json>>{{"transport", "pigeon"},
                                                                              {"op", 3},
                                                                              {"workload", 4},
                                                                              {"sockets", 0},
                                                                              {"sockets", 65},
                                                                              {"buffer_bytes", -1}}) {
    Json bad = to_json(request);
    bad[field] = value;
    EXPECT_FALSE(floor_request_from(bad).is_ok()) << field;
  }
}

TEST(Control, HostsOfEndpoints) {
  EXPECT_EQ(host_of("tcp://10.0.0.7:80"), "10.0.0.7");
  EXPECT_EQ(host_of("tcp://[::1]:80"), "::1");
  EXPECT_EQ(*host_towards("tcp://127.0.0.1:80"), "127.0.0.1");
  EXPECT_FALSE(host_towards("tcp://no-such-host.invalid:80").is_ok());
}

}  // namespace
}  // namespace kvferry::bench
