"""Outputs in each family's published format, and what they mean."""

# ruff: noqa: E501 (the formats are easier to compare with what their authors published when unbroken)

from __future__ import annotations

from typing import Any, NamedTuple

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "metric": {"type": "boolean"}, "note": {"type": ["string", "null"], "maxLength": 4},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]

PARIS = '{"city": "Paris", "days": 3}'


class Case(NamedTuple):
    """``calls``: (name, arguments as written)."""

    parser: str
    text: str
    content: str
    calls: list[tuple[str, str]]
    reasoning: str = ""


BOTH = [("get_weather", PARIS), ("now", "{}")]

CASES = [
    Case("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>', "", BOTH[:1]),
    Case("hermes", f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n<tool_call>\n'
         '{"arguments": {}, "name": "now"}\n</tool_call>', "Let me see.\n", BOTH),
    Case("hermes", 'a < b, <tool> and <tool_call', "a < b, <tool> and <tool_call", []),
    Case("hermes", 'say <tool_call>hello</tool_call>', "say <tool_call>hello</tool_call>", []),
    Case("hermes", '<tool_call>{"name": "now"}</tool_call> Done.', " Done.", [("now", "{}")]),
    Case("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, {"b', "", [("f", '{"a": [1, {"b')]),
    Case("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    Case("hermes", '<tool_call>{"name": "f", "arguments": {"s": "one\ntwo \\d \\\' </tool_call>"}}</tool_call>', "",
         [("f", '{"s": "one\\ntwo \\\\d \' </tool_call>"}')]),
    Case("hermes", "  \n ", "  \n ", []),
    Case("qwen3_coder", "Now:\n<tool_call>\n<function=get_weather>\n<parameter=city>\nPa \"r\" <is>\n\n</parameter>\n"
         "<parameter=days>\n3\n</parameter>\n<parameter=metric>\nTrue\n</parameter>\n<parameter=tags>\n['a', \"b\"]\n</parameter>\n"
         "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>", "Now:\n",
         [("get_weather", '{"city": "Pa \\"r\\" <is>\\n", "days": 3, "metric": true, "tags": ["a", "b"]}'), BOTH[1]]),
    Case("qwen3_coder", "<function=get_weather>\n<parameter=note>\nnull\n</parameter>\n<parameter=note2>\n12\n</parameter>\n"
         "</function> bye", " bye", [("get_weather", '{"note": null, "note2": 12}')]),
    Case("qwen3_coder", '<function=now>\n<parameter=a>\n{"b": "x</parameter>\\n<parameter=c>"}\n</parameter>\n<parameter=d>\n1\n</parameter>\n'
         "</function>", "", [("now", '{"a": {"b": "x</parameter>\\n<parameter=c>"}, "d": 1}')]),
    Case("qwen3_coder", '<function=now>\n<parameter=a>\n"open\n</parameter>\n<parameter=d>\n1\n</parameter>\n</function>', "",
         [("now", '{"a": "\\"open", "d": 1}')]),
    Case("qwen3_coder", "<tool_call> <function>", "<tool_call> <function>", []),
    Case("glm45", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
         "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>", "", BOTH),
    Case("glm45", '<tool_call>now\n<arg_key>a</arg_key>\n<arg_value>["</arg_value>"]</arg_value>\n</tool_call>', "",
         [("now", '{"a": ["</arg_value>"]}')]),
    Case("glm45", "x<tool_call>now</tool_call>y", "xy", [("now", "{}")]),
    Case("glm45", "<tool_call>two words\n", "<tool_call>two words\n", []),
    Case("llama3", f'{{"name": "get_weather", "parameters": {PARIS}}}<|eot_id|>', "", BOTH[:1]),
    Case("llama3", f'<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}}; {{"name": "now", "parameters": {{}}}}'
         "<|eom_id|>", "", BOTH),
    Case("llama3", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    Case("llama3", '{"name": "now"}', '{"name": "now"}', []),
    Case("llama3", 'Sure:\n{"name": "now", "parameters": {}}', "Sure:\n", [("now", "{}")]),
    Case("pythonic", "[get_weather(city='Paris', days=3), now()]", "", BOTH),
    Case("pythonic", "<|python_start|>[now()]<|python_end|>", "", BOTH[1:]),
    Case("pythonic", 'See [the docs](now) and\n[1, 2]\n[now(a={"b": [True, None, (1, 2)]}, c=false, d=-1.5, e="x), y")]',
         "See [the docs](now) and\n[1, 2]\n",
         [("now", '{"a": {"b": [true, null, [1, 2]]}, "c": false, "d": -1.5, "e": "x), y"}')]),
    Case("pythonic", "[unknown(a=1)]", "[unknown(a=1)]", []),
    Case("mistral", f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "now", "arguments": {{}}}}]</s>',
         "", BOTH),
    Case("mistral", "The [TOOL_CALLS] mark", "The [TOOL_CALLS] mark", []),
    Case("mistral_v11", f"Ok.[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]now[CALL_ID]xyz[ARGS]{{}}</s>", "Ok.", BOTH),
    Case("deepseek_v3", "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n" + PARIS
         + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
         "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>", "Hm.", BOTH),
    Case("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>" + PARIS + "<｜tool▁call▁end｜>"
         "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "", BOTH),
    Case("kimi_k2", "One moment<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
         + PARIS + "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
         "<|tool_calls_section_end|><|im_end|>", "One moment", BOTH),
    Case("gpt-oss", "<|channel|>analysis<|message|>Need weather.<|end|><|start|>assistant<|channel|>commentary "
         f"to=functions.get_weather <|constrain|>json<|message|>{PARIS}<|call|>", "", BOTH[:1], "Need weather."),
    Case("gpt-oss", " to=functions.now<|channel|>commentary json<|message|>{}<|call|>", "", BOTH[1:]),
    Case("gpt-oss", "<|channel|>analysis<|message|>T<|end|><|start|>assistant<|channel|>final<|message|>Hi <b>!<|return|>",
         "Hi <b>!", [], "T"),
]

TEMPLATES = {
    "hermes": "{%- if tools %}<tools></tools> return within <tool_call></tool_call> XML tags",
    "qwen3_coder": "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>",
    "glm45": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>",
    "llama3": '<|start_header_id|>ipython ... {"name": function name, "parameters": dictionary of argument name and its value}',
    "pythonic": "in the format of [func_name1(params_name1=params_value1)]",
    "mistral": "{{- '[TOOL_CALLS] [' }}",
    "mistral_v11": "{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n' + '```json'",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>' + arguments",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "gpt-oss": "<|start|>assistant<|channel|>commentary to=functions.x",
    "": "{% for message in messages %}<|im_start|>{{ message.content }}{% endfor %}",
}
