// A recursive-descent parser of the PTX that nvcc writes (PTX ISA chapters 4, 5 and 11).
#include <cstring>

#include "ptx.h"

namespace moksim {
namespace {

struct Token {
    enum Kind { kEnd, kWord, kNumber, kString, kPunctuation } kind = kEnd;
    std::string text;
    int line = 0;
};

bool is_word_start(char c) {
    return isalpha(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%';
}
bool is_word(char c) {
    return isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%';
}

// Words take their dots along ("ld.global.b32", "%tid.x", "L2::cache_hint"); directives start with a dot.
std::vector<Token> tokenize(const std::string& text) {
    std::vector<Token> tokens;
    int line = 1;
    const size_t n = text.size();
    for (size_t i = 0; i < n;) {
        const char c = text[i];
        if (c == '\n') {
            ++line, ++i;
        } else if (isspace(static_cast<unsigned char>(c))) {
            ++i;
        } else if (text.compare(i, 2, "//") == 0) {
            while (i < n && text[i] != '\n') ++i;
        } else if (text.compare(i, 2, "/*") == 0) {
            for (i += 2; i < n && text.compare(i, 2, "*/") != 0; ++i) line += text[i] == '\n';
            i += 2;
        } else if (c == '"') {
            size_t end = i + 1;
            while (end < n && text[end] != '"') end += text[end] == '\\' ? 2 : 1;
            tokens.push_back({Token::kString, text.substr(i + 1, end - i - 1), line});
            i = end + 1;
        } else if (isdigit(static_cast<unsigned char>(c))) {
            size_t end = i;
            while (end < n && (isalnum(static_cast<unsigned char>(text[end])) ||
                               (text[end] == '.' && end + 1 < n && isdigit(static_cast<unsigned char>(text[end + 1])))))
                ++end;
            tokens.push_back({Token::kNumber, text.substr(i, end - i), line});
            i = end;
        } else if (is_word_start(c) || (c == '.' && i + 1 < n && is_word_start(text[i + 1]))) {
            size_t end = i + 1;
            while (end < n && (is_word(text[end]) || (text[end] == '.' && end + 1 < n && is_word(text[end + 1])) ||
                               text.compare(end, 2, "::") == 0))
                end += text.compare(end, 2, "::") == 0 ? 2 : 1;
            tokens.push_back({Token::kWord, text.substr(i, end - i), line});
            i = end;
        } else {
            tokens.push_back({Token::kPunctuation, std::string(1, c), line});
            ++i;
        }
    }
    tokens.push_back({Token::kEnd, "", line});
    return tokens;
}

struct Scope {
    std::unordered_map<std::string, std::string> names;  // as written -> unique
};

class Parser {
  public:
    explicit Parser(const std::string& text) : tokens_(tokenize(text)) {}

    Module parse() {
        while (peek().kind != Token::kEnd) top_level();
        return std::move(module_);
    }

  private:
    [[noreturn]] void fail(const std::string& what) const {
        throw PtxError("PTX line " + std::to_string(peek().line) + ": " + what + " at '" + peek().text + "'");
    }
    const Token& peek(int ahead = 0) const { return tokens_[std::min(position_ + ahead, tokens_.size() - 1)]; }
    Token next() { return tokens_[position_ < tokens_.size() - 1 ? position_++ : position_]; }
    bool is(const char* text) const { return peek().text == text && peek().kind != Token::kString; }
    bool accept(const char* text) {
        if (!is(text)) return false;
        next();
        return true;
    }
    void expect(const char* text) {
        if (!accept(text)) fail(std::string("expected '") + text + "'");
    }
    std::string word() {
        if (peek().kind != Token::kWord) fail("expected a name");
        return next().text;
    }

    uint64_t number(bool* is_float = nullptr) {
        const std::string text = next().text;
        if (is_float) *is_float = false;
        if (text.size() > 2 && text[0] == '0' && strchr("fFdD", text[1])) {  // section 4.5.2
            if (is_float) *is_float = true;
            return std::stoull(text.substr(2), nullptr, 16);
        }
        std::string digits = text;
        while (!digits.empty() && (digits.back() == 'U' || digits.back() == 'u')) digits.pop_back();
        if (digits.size() > 2 && (digits[1] == 'b' || digits[1] == 'B'))
            return std::stoull(digits.substr(2), nullptr, 2);
        return std::stoull(digits, nullptr, 0);
    }
    int64_t signed_number() {
        const bool negative = accept("-");
        const auto value = static_cast<int64_t>(number());
        return negative ? -value : value;
    }

    void skip_to_semicolon() {
        while (!is(";") && peek().kind != Token::kEnd) next();
        expect(";");
    }

    void top_level() {
        if (accept(".version")) {
            next();
            if (accept(".")) next();
        } else if (accept(".target")) {
            do word();
            while (accept(","));
        } else if (accept(".address_size")) {
            next();
        } else if (is(".file")) {
            file_directive();
        } else if (is(".section")) {
            next(), next(), skip_braces();
        } else if (is(".alias") || is(".pragma")) {
            skip_to_semicolon();
        } else {
            bool is_linkage = true;
            while (is_linkage)
                is_linkage = accept(".visible") || accept(".extern") || accept(".weak") || accept(".common");
            if (is(".entry") || is(".func"))
                function();
            else if (is(".global") || is(".const") || is(".shared"))
                module_.globals.push_back(variable());
            else
                fail("unknown directive");
        }
    }

    void skip_braces() {
        expect("{");
        for (int depth = 1; depth && peek().kind != Token::kEnd;) {
            const Token token = next();
            if (token.kind == Token::kPunctuation) depth += token.text == "{" ? 1 : token.text == "}" ? -1 : 0;
        }
    }

    void file_directive() {
        next();
        const int index = static_cast<int>(number());
        module_.files[index] = next().text;
        while (accept(",")) next();
    }

    // ".space [.align n] [.attribute(...)] .type name[n][m] = {...}", without the final semicolon (section 5.4).
    Variable declaration() {
        Variable v;
        v.space = word().substr(1);
        bool has_align = false;
        uint64_t vector = 1;
        while (true) {
            if (accept(".align")) {
                v.align = number(), has_align = true;
            } else if (accept(".attribute")) {
                while (!accept(")")) next();
            } else if (accept(".ptr")) {
                while (is(".global") || is(".shared") || is(".const") || is(".local")) next();
            } else if (is(".v2") || is(".v4")) {
                vector = next().text[2] - '0';
            } else if (peek().text[0] == '.' && v.type.empty()) {
                v.type = next().text.substr(1);
            } else {
                break;
            }
        }
        v.name = word();
        v.size = type_size(v.type) * vector;
        if (!has_align) v.align = v.size;
        uint64_t count = 1;
        bool is_open = false;
        while (accept("[")) {
            if (is("]"))
                is_open = true;
            else
                count *= number();
            expect("]");
        }
        v.size = is_open ? 0 : v.size * count;
        if (accept("=")) initializer(v, is_open);
        return v;
    }

    Variable variable() {
        Variable v = declaration();
        expect(";");
        return v;
    }

    void initializer(Variable& v, bool is_open) {
        const uint64_t width = type_size(v.type);
        auto put = [&](uint64_t value) {
            for (uint64_t i = 0; i < width; ++i) v.init.push_back(static_cast<uint8_t>(value >> (8 * i)));
        };
        auto element = [&] {
            if (peek().kind == Token::kWord) {
                std::string name = word();
                if (name == "generic") expect("("), name = word(), expect(")");
                v.init_symbols.push_back({v.init.size(), name});
                put(0);
            } else {
                const bool negative = accept("-");
                const uint64_t value = number();
                put(negative ? 0 - value : value);
            }
        };
        if (accept("{")) {
            for (int depth = 1; depth;) {
                if (accept("{")) {
                    ++depth;
                } else if (accept("}")) {
                    --depth;
                } else if (!accept(",")) {
                    element();
                }
            }
        } else {
            element();
        }
        if (is_open) v.size = v.init.size();
        v.init.resize(v.size);
    }

    std::vector<Variable> parameters() {
        std::vector<Variable> result;
        if (!accept("(")) return result;
        while (!accept(")")) {
            result.push_back(declaration());
            accept(",");
        }
        return result;
    }

    void function() {
        auto f = std::make_unique<Function>();
        f->is_entry = word() == ".entry";
        f->returns = parameters();
        f->name = word();
        f->params = parameters();
        while (!is("{") && !is(";")) function_directive(*f);
        if (accept(";")) {
            f->is_declaration = true;
        } else {
            function_ = f.get();
            scopes_.clear();
            body();
        }
        module_.functions.push_back(std::move(f));
    }

    void function_directive(Function& f) {  // section 11.2 and 11.4
        const std::string name = word();
        auto numbers = [&](int* out, int count) {
            for (int i = 0; i < count; ++i) {
                out[i] = static_cast<int>(number());
                if (!accept(",")) break;
            }
        };
        int shape[3] = {1, 1, 1};
        if (name == ".maxntid" || name == ".reqntid") {
            numbers(shape, 3);
            f.max_threads = shape[0] * shape[1] * shape[2];
        } else if (name == ".minnctapersm") {
            numbers(&f.min_ctas, 1);
        } else if (name == ".maxnreg") {
            numbers(&f.max_registers, 1);
        } else if (name == ".reqnctapercluster") {
            f.cluster[0] = f.cluster[1] = f.cluster[2] = 1;
            numbers(f.cluster, 3);
        } else if (name == ".maxclusterrank") {
            numbers(shape, 1);
        } else if (name == ".pragma") {
            skip_to_semicolon();
        } else if (name != ".explicitcluster" && name != ".noreturn" && name != ".blocksareclusters") {
            fail("unknown function directive " + name);
        }
    }

    std::string unique(const std::string& name) {
        return scopes_.size() == 1 ? name : name + "#" + std::to_string(next_scope_name_++);
    }
    std::string resolve(const std::string& name) const {
        for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
            auto found = scope->names.find(name);
            if (found != scope->names.end()) return found->second;
        }
        return name;
    }

    // Labels are scoped like names and may be used before they stand, so they are declared ahead.
    void declare_labels() {
        int depth = 0;
        for (size_t i = position_; i < tokens_.size(); ++i) {
            const Token& token = tokens_[i];
            if (token.kind == Token::kPunctuation && token.text == "{") ++depth;
            if (token.kind == Token::kPunctuation && token.text == "}" && --depth < 0) return;
            const bool starts = i == position_ ||
                                (tokens_[i - 1].kind == Token::kPunctuation && strchr(";:{}", tokens_[i - 1].text[0]));
            if (depth == 0 && token.kind == Token::kWord && starts && tokens_[i + 1].text == ":")
                scopes_.back().names[token.text] = unique(token.text);
        }
    }

    void body() {
        expect("{");
        scopes_.emplace_back();
        declare_labels();
        while (!accept("}")) statement();
        scopes_.pop_back();
    }

    void statement() {
        if (is("{")) {
            body();
        } else if (accept(";")) {
        } else if (is(".reg")) {
            register_declaration();
        } else if (is(".local") || is(".shared") || is(".param") || is(".const") || is(".global")) {
            Variable v = variable();
            const std::string name = unique(v.name);
            scopes_.back().names[v.name] = name;
            v.name = name;
            function_->locals.push_back(v);
        } else if (accept(".loc")) {
            location();
        } else if (is(".file")) {
            file_directive();
        } else if (is(".pragma")) {
            skip_to_semicolon();
        } else if (peek().kind == Token::kWord && peek(1).text == ":") {
            label();
        } else {
            instruction();
        }
    }

    void register_declaration() {
        next();
        std::string type = word().substr(1);
        do {
            const std::string name = word();
            if (accept("<")) {  // section 5.4.6: %r<4> declares %r0 .. %r3
                const uint64_t count = number();
                expect(">");
                for (uint64_t i = 0; i < count; ++i) declare_register(name + std::to_string(i), type);
            } else {
                declare_register(name, type);
            }
        } while (accept(","));
        expect(";");
    }
    void declare_register(const std::string& name, const std::string& type) {
        const std::string u = unique(name);
        scopes_.back().names[name] = u;
        function_->registers[u] = type;
    }

    void location() {  // ".loc file line column [, function_name label, inlined_at file line column]"
        file_ = static_cast<int>(number()), line_ = static_cast<int>(number());
        caller_file_ = caller_line_ = 0;
        number();
        while (accept(",")) {
            const std::string kind = word();
            if (kind == "inlined_at") {
                caller_file_ = static_cast<int>(number()), caller_line_ = static_cast<int>(number());
                number();
            } else {
                word();
                if (accept("+")) number();
            }
        }
    }

    void label() {
        const std::string name = resolve(word());
        expect(":");
        if (accept(".branchtargets")) {
            auto& targets = function_->branches[name];
            do targets.push_back(resolve(word()));
            while (accept(","));
            expect(";");
        } else if (is(".callprototype") || is(".calltargets")) {
            skip_to_semicolon();
        } else {
            function_->labels[name] = static_cast<uint32_t>(function_->body.size());
        }
    }

    void instruction() {
        Instruction in;
        in.ptx_line = peek().line;
        in.file = file_, in.line = line_, in.caller_file = caller_file_, in.caller_line = caller_line_;
        if (accept("@")) {
            in.guard_negated = accept("!");
            in.guard = resolve(word());
        }
        in.opcode = word();
        if (in.opcode.compare(0, 4, "call") == 0) {
            call_operands(in);
        } else {
            while (!is(";")) {
                in.operands.push_back(operand());
                if (!accept(",") && !is(";")) fail("expected ',' or ';' in " + in.opcode);
            }
        }
        expect(";");
        function_->body.push_back(std::move(in));
    }

    // "call (ret), function, (args), prototype": three operands (vectors of names around the callee).
    void call_operands(Instruction& in) {
        auto list = [&] {
            Operand o;
            o.kind = Operand::kVector;
            if (accept("("))
                while (!accept(")")) {
                    o.elements.push_back(operand());
                    accept(",");
                }
            return o;
        };
        in.operands.push_back(list());
        accept(",");
        in.operands.push_back(operand());
        accept(",");
        in.operands.push_back(list());
        if (accept(",")) operand();
    }

    Operand operand() {
        Operand o;
        if (accept("[")) {
            o.kind = Operand::kAddress;
            if (peek().kind == Token::kWord) {
                o.name = resolve(word());
            } else {
                o.offset = signed_number();
            }
            while (is("+") || is("-")) {
                accept("+");
                o.offset += signed_number();
            }
            while (accept(",")) o.elements.push_back(operand());
            expect("]");
        } else if (accept("{")) {
            o.kind = Operand::kVector;
            while (!accept("}")) {
                o.elements.push_back(operand());
                accept(",");
            }
        } else if (is("-") || peek().kind == Token::kNumber) {
            o.kind = Operand::kImmediate;
            const bool negative = accept("-");
            o.value = number(&o.is_float);
            if (negative) o.value = 0 - o.value;
        } else {
            named_operand(o);
        }
        return o;
    }

    void named_operand(Operand& o) {
        o.negated = accept("!");
        const std::string name = word();
        if (name == "_") {
            o.kind = Operand::kSink;
            if (accept("|")) o.second = resolve(word());
            return;
        }
        o.name = resolve(name);
        const bool is_special = name[0] == '%';
        o.kind = function_->registers.count(o.name) || is_special ? Operand::kRegister : Operand::kSymbol;
        if (accept("|")) o.second = resolve(word());
        while (o.kind == Operand::kSymbol && (is("+") || is("-"))) {
            accept("+");
            o.offset += signed_number();
        }
    }

    std::vector<Token> tokens_;
    size_t position_ = 0;
    Module module_;
    Function* function_ = nullptr;
    std::vector<Scope> scopes_;
    int next_scope_name_ = 0;
    int file_ = 0, line_ = 0, caller_file_ = 0, caller_line_ = 0;
};

}  // namespace

uint64_t type_size(const std::string& type) {
    if (type == "pred") return 1;
    size_t digit = type.find_first_of("0123456789");
    if (digit == std::string::npos) throw PtxError("unknown type ." + type);
    const uint64_t bits = std::stoull(type.substr(digit));
    const bool is_pair = type.size() > 2 && type.compare(type.size() - 2, 2, "x2") == 0;
    return bits / 8 * (is_pair ? 2 : 1);
}

Module parse_ptx(const std::string& text) {
    return Parser(text).parse();
}

}  // namespace moksim
