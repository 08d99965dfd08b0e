"""Adverbs, expressions of time, names and numerals: the words that fill the places around a clause."""

from __future__ import annotations

__all__ = ["DEGREES", "FREQUENCIES", "MANNERS", "NAMES", "NUMERALS", "RELATIONS", "SURNAMES", "TIMES", "TITLES"]

MANNERS: dict[str, tuple[str, str]] = {
    "fast": ("quickly", "빨리"),
    "slow": ("slowly", "천천히"),
    "quiet": ("quietly", "조용히"),
    "loud": ("loudly", "크게"),
    "care": ("carefully", "조심스럽게"),
    "hard": ("hard", "열심히"),
    "well": ("well", "잘"),
    "alone": ("alone", "혼자"),
    "again": ("again", "다시"),
    "late": ("late", "늦게"),
    "early": ("early", "일찍"),
    "sudden": ("suddenly", "갑자기"),
}
"""The key that verbs name, and the adverb in both languages; said after the object."""

FREQUENCIES: dict[str, str] = {"often": "자주", "always": "항상", "sometimes": "가끔", "usually": "보통"}
"""Said before the verb in English."""

DEGREES: dict[str, str] = {"very": "아주", "really": "정말", "too": "너무", "a little": "조금"}
"""Said before an adjective."""

TIMES: dict[str, tuple[str, str]] = {
    "yesterday": ("어제", "past"),
    "last night": ("어젯밤에", "past"),
    "this morning": ("오늘 아침에", "past"),
    "last week": ("지난주에", "past"),
    "last month": ("지난달에", "past"),
    "last year": ("작년에", "past"),
    "two days ago": ("이틀 전에", "past"),
    "an hour ago": ("한 시간 전에", "past"),
    "every day": ("매일", "present"),
    "every morning": ("매일 아침", "present"),
    "every week": ("매주", "present"),
    "these days": ("요즘", "present"),
    "on weekends": ("주말마다", "present"),
    "now": ("지금", "now"),
    "tomorrow": ("내일", "future"),
    "tonight": ("오늘 밤에", "future"),
    "next week": ("다음 주에", "future"),
    "next month": ("다음 달에", "future"),
    "next year": ("내년에", "future"),
    "this weekend": ("이번 주말에", "future"),
    "soon": ("곧", "future"),
    "on Monday": ("월요일에", "past future"),
    "on Friday": ("금요일에", "past future"),
    "on Sunday": ("일요일에", "past future"),
    "today": ("오늘", "past future"),
}
"""The Korean and the tenses it goes with; `now` is the progressive present."""

RELATIONS: dict[str, str] = {
    "on": "위에",
    "under": "아래에",
    "behind": "뒤에",
    "next to": "옆에",
    "in front of": "앞에",
    "inside": "안에",
}
"""Where one thing is in respect to another: Korean says it with a noun after the thing."""

NUMERALS: dict[int, tuple[str, str]] = {
    2: ("two", "두"),
    3: ("three", "세"),
    4: ("four", "네"),
    5: ("five", "다섯"),
    10: ("ten", "열"),
}
"""The native numerals in the form that stands before a counter."""

NAMES: dict[str, tuple[str, str]] = {
    "Minsu": ("민수", "m"),
    "Jihun": ("지훈", "m"),
    "Junho": ("준호", "m"),
    "Taemin": ("태민", "m"),
    "Sujin": ("수진", "f"),
    "Yuna": ("유나", "f"),
    "Mina": ("미나", "f"),
    "Seoyeon": ("서연", "f"),
}

SURNAMES: dict[str, str] = {"Kim": "김", "Lee": "이", "Park": "박", "Choi": "최", "Kang": "강", "Yoon": "윤"}

TITLES: dict[str, tuple[str, str]] = {
    "Mr.": ("선생님", "m"),
    "Ms.": ("선생님", "f"),
    "Dr.": ("박사님", ""),
    "Professor": ("교수님", ""),
}
"""Forms of address that honour: the surname stands before them in Korean."""
