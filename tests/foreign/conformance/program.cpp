// A program for mmpos conformance run that answers requests about RoPE-Tie and parses JSON itself.
#include <iostream>
#include <map>
#include <string>
#include <vector>
struct Json { std::map<std::string, Json> of; std::vector<Json> items; std::string text; long number = 0; };
using Ids = std::vector<std::vector<long>>;  // (tokens, axes)

Json parse(const char*& c) {
  Json value;
  if (*c == '"') {
    while (*++c != '"') value.text += *c;
  } else if (*c == '{' || *c == '[') {
    for (bool object = *c++ == '{'; *c != '}' && *c != ']'; c += *c == ',') {
      std::string name = object ? parse(c).text : "";
      (object ? value.of[name] : value.items.emplace_back()) = parse(c += object);
    }
  } else for (value.number = std::atol(c--); std::string(",]}").find(c[1]) > 2; ++c);  // requests contain no fractions
  ++c;
  return value;
}

long place(Json& document, Ids& ids) {  // returns the next position
  long cursor = document.of["start"].number;
  for (Json& part : document.of["segments"].items) {
    for (long n = part.of["text"].number; n > 0; --n) ids.emplace_back(2, cursor++);
    if (part.of["grid"].items.empty()) continue;
    long rows = part.of["grid"].items[1].number, columns = part.of["grid"].items[2].number, before = cursor - 1;
    for (long i = 1; i <= rows; ++i)
      for (long j = 1; j <= columns; ++j) ids.push_back({before + (columns + 1) * i, before + (rows + 1) * j});
    cursor = before + (columns + 1) * (rows + 1);
  }
  return cursor;
}

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    const char* c = line.c_str();
    Json request = parse(c);
    std::string ask = request.of["ask"].text, bounds = "0", rows;
    std::cout << "{\"case\":\"" << request.of["case"].text << "\",";
    bool known = ask != "padded" && ask != "rotation" && line.find("row_separator") == std::string::npos;
    if (!known) { std::cout << "\"unsupported\":\"padding, rotations or row separators\"}" << std::endl; continue; }
    Ids ids, chosen;
    long next = 0, start = request.of["start"].number, stop = request.of["stop"].number;
    for (Json& document : request.of["documents"].items) next = place(document, ids), bounds += "," + std::to_string(ids.size());
    if (ask == "prefill" || ask == "packed") stop = ids.size();
    if (ask == "decode") start = ids.size();
    if (ask == "decode" || ask == "draft") stop = start + request.of["steps"].number + request.of["length"].number;
    for (long n = 0; n < 9; ++n) ids.emplace_back(ids[0].size(), next + n);
    for (long n = start; n < stop; ++n) chosen.push_back(ids[n]);
    for (Json& kept : request.of["keep"].items) chosen.push_back(ids[kept.number]);
    for (size_t n = 0; n < chosen.size() * ids[0].size(); ++n)
      rows += (n % chosen.size() ? "," : n ? "],[" : "") + std::to_string(chosen[n % chosen.size()][n / chosen.size()]);
    long delta = next - request.of["documents"].items[0].of["start"].number - chosen.size();
    std::cout << "\"next_position\":" << next << ",\"delta\":" << delta << ",\"cu_seqlens\":[" << bounds;
    std::cout << "],\"position_ids\":[[" << rows << "]]}" << std::endl;
  }
}
