#include "bench/benchmark_run.hpp"

#include <algorithm>

#include <fmt/core.h>

#include "bench/data_check.hpp"
#include "bench/trips.hpp"

namespace kvferry::bench {
namespace {

/// The floor's trips through the same timed loop as kvferry's.
class FloorTrips : public TripIssuer {
 public:
  explicit FloorTrips(Floor& floor) : floor_(floor) {}
  std::uint32_t lanes() const override { return 1; }
  void submit(std::uint32_t) override { status_ = floor_.trip(); }
  Status wait(std::uint32_t) override { return status_; }

 private:
  Floor& floor_;
  Status status_;
};

/// One raw way and its trip times over all rounds.
struct FloorRow {
  std::unique_ptr<Floor> floor;
  LatencyStats stats;
};

/// The share of a limit that one round may use.
TripLimits share_of(const TripLimits& limits, std::uint32_t rounds, std::uint64_t trips_done) {
  TripLimits share;
  share.seconds = limits.seconds / rounds;
  if (limits.trips > 0) {
    share.trips = std::min((limits.trips + rounds - 1) / rounds, limits.trips - trips_done);
  }
  return share;
}

bool moves_to_target(BenchOp op) { return op == BenchOp::write || op == BenchOp::write_imm; }

}  // namespace

class BenchmarkRun::Impl {
 public:
  Impl(Engine& engine, ControlClient control, const BenchOptions& options, const EngineConfig& config,
       const std::atomic<bool>& stop)
      : engine_(engine),
        control_(std::move(control)),
        options_(options),
        rails_(config.rails),
        sockets_(static_cast<std::size_t>(config.tcp.sockets) * static_cast<std::size_t>(config.rails)),
        stop_(stop) {}

  Status prepare(std::uint64_t bytes) {
    auto local = engine_.allocate("bench", bytes);
    if (!local) return local.status();
    auto remote = control_.prepare(bytes);
    if (!remote) return remote.status();
    local_ = *local;
    remote_ = *remote;
    return Status::ok();
  }

  Status begin(const BenchCase& bench_case) {
    end_case();
    case_ = bench_case;
    round_ = 0;
    section_ = {};
    stats_ = {};
    mismatch_.clear();
    if (case_.op == BenchOp::sendrecv) {
      echo_.emplace(engine_, control_.peer(), control_.incoming(), case_);
    } else {
      one_sided_.emplace(engine_, control_.peer(), local_, remote_.handle, case_);
    }
    if (case_.op == BenchOp::write_imm) {
      if (auto status = control_.reset_notifications(); !status) return status;
    }
    return options_.floor ? open_floors() : Status::ok();
  }

  Result<bool> step() {
    if (progress_) progress_(case_, round_ + 1, options_.rounds);
    if (auto status = case_.op == BenchOp::sendrecv ? echo_round() : one_sided_round(); !status) return status;
    if (auto status = floor_round(); !status) return status;
    ++round_;
    const bool trips_left = options_.limits.trips == 0 || section_.trips < options_.limits.trips;
    return round_ < options_.rounds && trips_left && !stop_;
  }

  CaseResult result() const {
    CaseResult result;
    result.bench_case = case_;
    result.transport = transport_in_use(control_.peer());
    result.num_rails = rails_;
    result.trips = section_.trips;
    result.seconds = section_.seconds;
    result.average_us = stats_.average_us();
    result.p50_us = stats_.quantile_us(0.5);
    result.p99_us = stats_.quantile_us(0.99);
    if (options_.verify) result.verified = mismatch_.empty();
    result.mismatch = mismatch_;
    add_floor(result);
    return result;
  }

  Status finish() {
    end_case();
    return control_.bye();
  }

  ProgressFunction progress_;

 private:
  void end_case() {
    floors_.clear();
    echo_.reset();
    one_sided_.reset();
  }

  Status open_floors() {
    const FloorSetting setting{transport_in_use(control_.peer()), host_of(options_.remote_endpoint), local_, remote_,
                               sockets_};
    auto opened = bench::open_floors(control_, setting, case_);
    if (!opened) return opened.status();
    for (auto& floor : *opened) floors_.push_back({std::move(floor), {}});
    return Status::ok();
  }

  /// The first trips of a case map memory and grow buffers: they count for nothing.
  Status warm_up(TripIssuer& issuer) {
    if (round_ > 0) return Status::ok();
    LatencyStats ignored;
    return run_trips(issuer, {0, 2 * std::uint64_t{issuer.lanes()}}, stop_, ignored).status();
  }

  Status time(TripIssuer& issuer) {
    auto section = run_trips(issuer, share_of(options_.limits, options_.rounds, section_.trips), stop_, stats_);
    if (!section) return section.status();
    section_.trips += section->trips;
    section_.seconds += section->seconds;
    return Status::ok();
  }

  Status one_sided_round() {
    if (auto status = warm_up(*one_sided_); !status) return status;
    if (auto status = set_up_data(); !status) return status;
    if (auto status = time(*one_sided_); !status) return status;
    return options_.verify ? check_data() : Status::ok();
  }

  Status set_up_data() {
    if (moves_to_target(case_.op)) {
      if (auto status = control_.poison(case_.workload); !status) return status;
      fill_blocks(local_.bytes(), case_.workload, Side::local, round_);
      return Status::ok();
    }
    if (auto status = control_.fill(case_.workload, round_); !status) return status;
    poison_region(local_.bytes(), case_.workload);
    return Status::ok();
  }

  Status check_data() {
    if (!moves_to_target(case_.op)) {
      const auto wrong = verify_region(local_.bytes(), case_.workload, Side::local, round_);
      if (wrong) note_mismatch(wrong->to_string());
      return Status::ok();
    }
    auto wrong = control_.verify(case_.workload, round_);
    if (!wrong) return wrong.status();
    note_mismatch(*wrong);
    if (case_.op != BenchOp::write_imm) return Status::ok();
    auto missing = control_.verify_notifications(one_sided_->notifications());
    if (!missing) return missing.status();
    note_mismatch(*missing);
    return Status::ok();
  }

  Status echo_round() {
    echo_->fill(round_);
    echo_->poison_echoes();
    if (auto status = control_.start_echo(); !status) return status;
    if (auto status = warm_up(*echo_); !status) return status;
    // The warm-up brought echoes already; only those of the timed trips may count.
    echo_->poison_echoes();
    if (auto status = time(*echo_); !status) return status;
    if (auto status = control_.end_echo(); !status) return status;
    if (options_.verify) note_mismatch(echo_->verify(round_));
    return Status::ok();
  }

  void note_mismatch(const std::string& text) {
    if (mismatch_.empty() && !text.empty()) mismatch_ = fmt::format("round {}: {}", round_, text);
  }

  Status floor_round() {
    for (FloorRow& row : floors_) {
      FloorTrips trips(*row.floor);
      if (auto status = warm_up(trips); !status) return status;
      const auto section =
          run_trips(trips, share_of(options_.limits, options_.rounds, row.stats.count()), stop_, row.stats);
      if (!section) return section.status();
    }
    return Status::ok();
  }

  void add_floor(CaseResult& result) const {
    if (floors_.empty() || stats_.count() == 0) return;
    const auto best = std::min_element(floors_.begin(), floors_.end(), [](const FloorRow& a, const FloorRow& b) {
      return a.stats.quantile_us(0.5) < b.stats.quantile_us(0.5);
    });
    result.floor_p50_us = best->stats.quantile_us(0.5);
    result.floor_name = best->floor->name();
    // With n transfers in flight together each takes n times as long as it keeps the path busy.
    if (result.p50_us > 0) result.floor_ratio = result.floor_p50_us * case_.workload.parts / result.p50_us;
  }

  Engine& engine_;
  ControlClient control_;
  BenchOptions options_;
  int rails_;
  std::size_t sockets_;
  const std::atomic<bool>& stop_;
  Region local_;
  TargetRegion remote_;
  // ---- the present case
  BenchCase case_;
  std::uint32_t round_ = 0;
  TimedSection section_;
  LatencyStats stats_;
  std::string mismatch_;
  std::optional<OneSidedTrips> one_sided_;
  std::optional<EchoTrips> echo_;
  std::vector<FloorRow> floors_;
};

BenchmarkRun::BenchmarkRun(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
BenchmarkRun::BenchmarkRun(BenchmarkRun&&) noexcept = default;
BenchmarkRun& BenchmarkRun::operator=(BenchmarkRun&&) noexcept = default;
BenchmarkRun::~BenchmarkRun() = default;

Result<BenchmarkRun> BenchmarkRun::create(Engine& engine, ControlClient control, const BenchOptions& options,
                                          const std::vector<BenchCase>& cases, const std::atomic<bool>& stop) {
  EngineConfig config = make_engine_config(options);
  if (auto status = config.apply_environment(); !status) return status;
  auto impl = std::make_unique<Impl>(engine, std::move(control), options, config, stop);
  if (auto status = impl->prepare(region_bytes_for(cases)); !status) return status;
  return BenchmarkRun(std::move(impl));
}

void BenchmarkRun::on_progress(ProgressFunction progress) { impl_->progress_ = std::move(progress); }

Result<CaseResult> BenchmarkRun::run(const BenchCase& bench_case) {
  if (auto status = begin(bench_case); !status) return status;
  for (;;) {
    auto more = step();
    if (!more) return more.status();
    if (!*more) return result();
  }
}

Status BenchmarkRun::begin(const BenchCase& bench_case) { return impl_->begin(bench_case); }
Result<bool> BenchmarkRun::step() { return impl_->step(); }
CaseResult BenchmarkRun::result() const { return impl_->result(); }
Status BenchmarkRun::finish() { return impl_->finish(); }

Result<bool> SweepJob::step() {
  if (!in_case_ && (next_ == cases_.size() || stop_)) {
    if (auto status = run_.finish(); !status) return status;
    return false;
  }
  if (!in_case_) {
    if (auto status = run_.begin(cases_[next_]); !status) return status;
  }
  auto more = run_.step();
  if (!more) return more;
  in_case_ = *more;
  if (!in_case_) {
    report_(run_.result());
    ++next_;
  }
  return true;
}

std::string transport_in_use(const Peer& peer) {
  constexpr std::string_view prefix = "up over ";
  const std::string description = peer.describe();
  if (!description.starts_with(prefix)) return "none";
  const auto begin = prefix.size();
  const auto end = description.find_first_of(", (:;", begin);
  return description.substr(begin, end == std::string::npos ? std::string::npos : end - begin);
}

}  // namespace kvferry::bench
