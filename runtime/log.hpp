// Logging for kvferry's own code; the host program chooses level and sink.
#pragma once

#include <functional>
#include <string_view>

namespace kvferry {

enum class LogLevel : unsigned char { debug = 0, info = 1, warning = 2, error = 3, off = 4 };

/// Least level that is written; starts as KVFERRY_LOG (debug, info, warning, error, off) or warning.
void set_log_level(LogLevel level) noexcept;
LogLevel log_level() noexcept;

/// Sends lines to `sink` instead of standard error; an empty function restores that. Any thread.
/// The sink is called by one thread at a time and not any more once this returns; it must not log.
void set_log_sink(std::function<void(LogLevel, std::string_view)> sink);

/// Writes one line when `level` is enabled. An error is logged once, where it is first understood.
void log(LogLevel level, std::string_view line);

}  // namespace kvferry
