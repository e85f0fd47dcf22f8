#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <kvferry/runtime/log.hpp>

namespace kvferry {

namespace {

std::optional<LogLevel> level_named(std::string_view name) {
  if (name == "debug") return LogLevel::debug;
  if (name == "info") return LogLevel::info;
  if (name == "warning") return LogLevel::warning;
  if (name == "error") return LogLevel::error;
  if (name == "off") return LogLevel::off;
  return std::nullopt;
}

spdlog::level::level_enum spdlog_level(LogLevel level) {
  switch (level) {
    case LogLevel::debug:
      return spdlog::level::debug;
    case LogLevel::info:
      return spdlog::level::info;
    case LogLevel::warning:
      return spdlog::level::warn;
    case LogLevel::error:
      return spdlog::level::err;
    case LogLevel::off:
      break;
  }
  return spdlog::level::off;
}

class Log {
 public:
  Log() : stderr_("kvferry", std::make_shared<spdlog::sinks::stderr_sink_mt>()) {
    stderr_.set_level(spdlog::level::trace);
    stderr_.set_pattern("kvferry %Y-%m-%dT%H:%M:%S.%e %l: %v");
    const char* wanted = std::getenv("KVFERRY_LOG");
    if (wanted == nullptr) return;
    if (const auto level = level_named(wanted)) {
      level_ = *level;
    } else {
      write(LogLevel::warning, std::string("KVFERRY_LOG=") + wanted + " is none of debug, info, warning, error, off");
    }
  }

  LogLevel level() const noexcept { return level_.load(std::memory_order_relaxed); }
  void set_level(LogLevel level) noexcept { level_.store(level, std::memory_order_relaxed); }

  void set_sink(std::function<void(LogLevel, std::string_view)> sink) {
    const std::lock_guard lock(mutex_);
    sink_.swap(sink);
  }

  void write(LogLevel level, std::string_view line) {
    const std::lock_guard lock(mutex_);
    if (sink_) {
      sink_(level, line);
    } else {
      stderr_.log(spdlog_level(level), spdlog::string_view_t(line.data(), line.size()));
    }
  }

 private:
  std::atomic<LogLevel> level_{LogLevel::warning};
  std::mutex mutex_;
  std::function<void(LogLevel, std::string_view)> sink_;
  spdlog::logger stderr_;
};

// Never destroyed: an engine in static storage may log after main has returned.
Log& the_log() {
  static Log* const log = new Log;
  return *log;
}

}  // namespace

void set_log_level(LogLevel level) noexcept { the_log().set_level(level); }

LogLevel log_level() noexcept { return the_log().level(); }

void set_log_sink(std::function<void(LogLevel, std::string_view)> sink) { the_log().set_sink(std::move(sink)); }

void log(LogLevel level, std::string_view line) {
  if (level == LogLevel::off || level < the_log().level()) return;
  the_log().write(level, line);
}

}  // namespace kvferry
