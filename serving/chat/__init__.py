"""Chats: messages to a prompt by the checkpoint's own template, and the model's text back to an answer's fields."""

from serving.chat.deltas import CallArguments, CallStart, Delta, Message, Text
from serving.chat.parser import AnswerParser
from serving.chat.parsers import REASONING_PARSERS, TOOL_PARSERS, Parsers, choose_parsers
from serving.chat.template import ChatTemplate, Shield, TemplateFault

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "AnswerParser",
    "CallArguments",
    "CallStart",
    "ChatTemplate",
    "Delta",
    "Message",
    "Parsers",
    "Shield",
    "TemplateFault",
    "Text",
    "choose_parsers",
]
