"""Two small chat templates that take tools, in the manner of the families that this server knows."""

from serving.chat import ChatTemplate

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather <today> of a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["place"],
        },
    },
}

HERMES = ChatTemplate(
    "{% if tools %}<|im_start|>system\n<tools>\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}</tools>\n"
    "Call as <tool_call>.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for c in m.content %}{{ c.text if c.type == 'text' else '<|image_pad|>' }}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% elif enable_thinking %}<think>\n{% endif %}{% endif %}"
)

GLM = ChatTemplate(
    "{% if tools %}<|im_start|>{% for t in tools %}{{ t.function.name }}: {{ t.function.parameters | tojson }}"
    "{% endfor %}<arg_key>{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>{% endfor %}"
    "</tool_call>{% endfor %}{% endfor %}<|im_start|>assistant<think>"
)
