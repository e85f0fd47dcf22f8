// The documents name every configuration field, every variable, every error code, and show the program that is tested.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include <kvferry/runtime/config.hpp>
#include <kvferry/runtime/status.hpp>

namespace kvferry {
namespace {

const std::filesystem::path source_dir = KVFERRY_SOURCE_DIR;

std::string content_of(const std::filesystem::path& file) {
  std::ifstream stream(source_dir / file);
  EXPECT_TRUE(stream) << file << " can not be opened";
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

/// What the pattern's first group matches, everywhere in the text.
std::set<std::string> all_of(const std::string& text, const char* pattern) {
  const std::regex regex(pattern);
  std::set<std::string> found;
  for (std::sregex_iterator it(text.begin(), text.end(), regex), end; it != end; ++it) found.insert((*it)[1]);
  return found;
}

TEST(Docs, ConfigurationListsEveryFieldWithItsVariableAndDefault) {
  const std::string page = content_of("docs/configuration.md");
  for (const ConfigField& field : config_fields()) {
    std::string row = "| `" + field.name + "` | `" + field.variable + "` | ";
    row += field.fallback.empty() ? "empty" : field.fallback;
    EXPECT_NE(page.find(row + " |"), std::string::npos) << "docs/configuration.md lacks the row: " << row << " | ...";
  }
}

TEST(Docs, ConfigurationNamesNoVariableThatDoesNotExist) {
  std::set<std::string> known{"KVFERRY_LOG", "KVFERRY_HOST_ID"};
  for (const ConfigField& field : config_fields()) known.insert(field.variable);
  for (const std::string& name : all_of(content_of("docs/configuration.md"), "\\| `(KVFERRY_[A-Z_]+)`"))
    EXPECT_TRUE(known.contains(name)) << name << " is documented, but no variable of that name is read";
}

TEST(Docs, EveryVariableThatTheCodeReadsIsDocumented) {
  const std::string page = content_of("docs/configuration.md");
  for (const char* folder : {"runtime", "transports", "actors"}) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(source_dir / folder)) {
      if (entry.path().extension() != ".cpp") continue;
      for (const std::string& name : all_of(content_of(entry.path()), "\"(KVFERRY_[A-Z_]+)\""))
        EXPECT_NE(page.find("`" + name + "`"), std::string::npos) << name << ", read in " << entry.path();
    }
  }
}

TEST(Docs, EveryErrorCodeHasItsSection) {
  const std::set<std::string> codes = all_of(content_of("runtime/status.hpp"), "\n  ([a-z_]+) = [0-9]+,");
  ASSERT_GE(codes.size(), 22u);
  const std::set<std::string> sections = all_of(content_of("docs/errors.md"), "\n## `([a-z_]+)`");
  for (const std::string& code : codes)
    EXPECT_TRUE(sections.contains(code)) << "docs/errors.md lacks a section for " << code;
  for (const std::string& section : sections) EXPECT_TRUE(codes.contains(section)) << section << " is no error code";
}

TEST(Docs, ReadmeShowsTheProgramThatIsTested) {
  EXPECT_NE(content_of("README.md").find("```cpp\n" + content_of("tests/package/consumer/main.cpp") + "```"),
            std::string::npos)
      << "README.md's program and tests/package/consumer/main.cpp differ";
}

TEST(Docs, KvcachePageShowsTheProgramThatIsTested) {
  EXPECT_NE(content_of("docs/kvcache.md").find("```cpp\n" + content_of("tests/kvcache/example.cpp") + "```"),
            std::string::npos)
      << "docs/kvcache.md's program and tests/kvcache/example.cpp differ";
}

TEST(Docs, EveryLinkedFileExists) {
  std::set<std::filesystem::path> pages{"README.md", "CHANGELOG.md"};
  for (const auto& entry : std::filesystem::directory_iterator(source_dir / "docs"))
    if (entry.path().extension() == ".md") pages.insert(std::filesystem::relative(entry.path(), source_dir));
  for (const auto& page : pages) {
    for (const std::string& target : all_of(content_of(page), "\\]\\(([^)#:]+)[)#]"))
      EXPECT_TRUE(std::filesystem::exists(source_dir / page.parent_path() / target)) << page << " links to " << target;
  }
}

}  // namespace
}  // namespace kvferry
