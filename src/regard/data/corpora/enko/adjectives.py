"""The adjectives: English | Korean stem | irregular class | the nouns they may describe | marks.

`@tag` stands for every noun with that tag, `-word` takes one away. Marks: hon=… the honorific stem; noshort (no 안
before it); mood (a passing state, which gives reasons); lasting (not said of the future); before=… the form before a
noun where it is not the regular one; only-before, only-after.
"""

from __future__ import annotations

__all__ = ["ADJECTIVES"]

ADJECTIVES = """
big | 크 | | @animal @furniture @dish @vehicle @nature @place @fruit ball doll hat -city -sea | lasting
small | 작 | | @animal @furniture @dish @vehicle @place @fruit ball doll hat stone star -city -sea | lasting
long | 길 | | @long -coat snake story movie poem letter | lasting
short | 짧 | | @long letter story poem movie trip class meeting -river | lasting
heavy | 무겁 | ㅂ | @heavy watermelon computer television coat | lasting
light | 가볍 | ㅂ | @heavy camera phone bicycle shoes guitar -watermelon -stone -piano | lasting
expensive | 비싸 | | @goods -rice -water -money |
cheap | 싸 | | @goods -water -money |
new | 새 | | @goods @place -@food -@drink -@city -money -mountain -river -lake -sea -beach -forest -island friend
    teacher | only-before before=새
old | 오래되 | | @furniture @machine @worn @readable @dish temple church bridge house tree school hotel coin photo
    letter | only-before before=오래된
clean | 깨끗하 | 하 | @indoors @clothes @dish river lake beach shoes street hotel restaurant |
dirty | 더럽 | ㅂ | @indoors @clothes @dish river street shoes window dog |
beautiful | 아름답 | ㅂ | flower rose garden mountain island lake sea beach city song picture princess queen music
    village star moon river forest butterfly | noshort lasting
pretty | 예쁘 | | @pretty girl baby princess daughter bird | lasting
hot | 뜨겁 | ㅂ | @hot water milk |
cold | 차갑 | ㅂ | @liquid stone |
fresh | 신선하 | 하 | @fresh fish bread salad meat egg |
delicious | 맛있 | | @food coffee tea juice beer wine dinner lunch breakfast | noshort
sweet | 달 | | @sweet | lasting
spicy | 맵 | ㅂ | @spicy soup |
soft | 부드럽 | ㅂ | @soft meat | lasting
round | 둥글 | | @round bread | lasting
sturdy | 튼튼하 | 하 | @sturdy ladder bridge house rope shoes -mirror | lasting
red | 빨갛 | ㅎ | @colored apple tomato strawberry door | lasting
blue | 파랗 | ㅎ | @colored bird bowl door -leaf -rose | lasting
yellow | 노랗 | ㅎ | @colored banana butterfly pear door | lasting
white | 하얗 | ㅎ | @colored rabbit cat horse sheep paper -leaf | lasting
black | 까맣 | ㅎ | @colored cat dog horse pig -flower -rose -leaf | lasting
interesting | 재미있 | | @bookish @shown @interest story dream song trip party festival history science newspaper |
    noshort
boring | 지루하 | 하 | @bookish @shown meeting class homework work trip |
difficult | 어렵 | ㅂ | @hard @subject book poem song |
easy | 쉽 | ㅂ | @hard @subject book |
important | 중요하 | 하 | @important letter reason work class truth |
wide | 넓 | | @wide bed desk table | lasting
narrow | 좁 | | @indoors street bridge store cafe bed | lasting
high | 높 | | @high bridge price | lasting
deep | 깊 | | @deep pot bowl forest | lasting
dark | 어둡 | ㅂ | @indoors street forest theater garden |
bright | 밝 | | @indoors star moon cafe library |
noisy | 시끄럽 | ㅂ | @noisy store theater party factory child | noshort
quiet | 조용하 | 하 | @quiet beach room office student classroom child museum |
near | 가깝 | ㅂ | @visited station airport beach sea -@city -village -city -island | only-after lasting
far | 멀 | | @visited station airport beach sea -@city | only-after lasting
famous | 유명하 | 하 | @famed @star song movie book museum mountain island | lasting
fast | 빠르 | 르 | @fast car bus ship bicycle | lasting
slow | 느리 | | @vehicle turtle cow elephant computer | lasting
comfortable | 편하 | 하 | @fits pants coat car hotel |
warm | 따뜻하 | 하 | @warm weather room milk water house bread soup |
cool | 시원하 | 하 | weather water juice room beer forest |
good | 좋 | | weather @machine book movie song plan answer restaurant hotel pen knife |
bad | 나쁘 | | weather plan dream |
strange | 이상하 | 하 | @strange question letter plan name answer | lasting
thick | 두껍 | ㅂ | @thick door rope | lasting
thin | 얇 | | @thin @thick -dictionary sweater skirt -coat | lasting
tired | 피곤하 | 하 | @person -baby | mood
busy | 바쁘 | | @person -baby | mood
sick | 아프 | | @person @pet | mood hon=편찮으시
happy | 행복하 | 하 | @person | mood
sad | 슬프 | | @person story song movie poem novel | mood
hungry | 배고프 | | @person -@hon @pet wolf tiger lion | mood only-after
lonely | 외롭 | ㅂ | @person -baby | mood
kind | 친절하 | 하 | @person -baby | lasting
smart | 똑똑하 | 하 | @person dog monkey puppy -baby -@hon | lasting
healthy | 건강하 | 하 | @person dog puppy horse |
diligent | 부지런하 | 하 | @person -baby | noshort lasting
lazy | 게으르 | 르 | @person cat pig -baby -@hon | noshort lasting
young | 젊 | | @adult -@hon -thief | lasting
brave | 용감하 | 하 | @person dog lion -baby -@hon | lasting
honest | 정직하 | 하 | @person -baby -thief -@hon | lasting
cute | 귀엽 | ㅂ | @cute @young monkey | lasting
fierce | 사납 | ㅂ | @fierce dog fox snake eagle | lasting
"""
