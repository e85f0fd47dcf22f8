// Results as text, JSON lines or CSV. Every function returns whole lines, each with its end.
#pragma once

#include <string>

#include "bench/benchmark_run.hpp"
#include "bench/options.hpp"
#include "bench/trace_replay.hpp"

namespace kvferry::bench {

/// What stands above the rows; empty for JSON.
std::string sweep_header(Output output);
std::string sweep_row(Output output, const CaseResult& result);

std::string trace_report(Output output, const TraceResult& result);

}  // namespace kvferry::bench
