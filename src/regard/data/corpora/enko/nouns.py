"""The nouns: people, animals, food, things, places, and what can be known or attended.

One block a kind: its tags (what verbs and adjectives ask for), its counter, and its words. After a word stand further
tags and these marks: m f (gender), hon (spoken of with 께서 and -시-), kin (always somebody's, as a friend is too),
elder (whose owner is 우리), mass (uncountable), plural (always plural), bare (no article), unique (always `the`),
nocount (no numeral), own (people and places that may be mine or ours).
"""

from __future__ import annotations

__all__ = ["NOUN_BLOCKS"]

NOUN_BLOCKS: tuple[tuple[str, str, str], ...] = (
    (
        "person",
        "명",
        """
        boy 소년 m young / girl 소녀 f young / child 아이 young own / baby 아기 young / student 학생 young own
        friend 친구 kin / man 남자 m adult / woman 여자 f adult / neighbor 이웃 adult own / thief 도둑 adult
        king 왕 m adult royal / queen 여왕 f adult royal / prince 왕자 m royal / princess 공주 f royal
        """,
    ),
    (
        "person adult job",
        "명",
        """
        doctor 의사 own / nurse 간호사 / farmer 농부 / fisherman 어부 / chef 요리사 / police officer 경찰관
        singer 가수 star / actor 배우 star / writer 작가 star / painter 화가 star / driver 운전사 / soldier 군인
        lawyer 변호사 / scientist 과학자 star / pilot 조종사 / carpenter 목수 / merchant 상인 / firefighter 소방관
        """,
    ),
    (
        "person adult",
        "분",
        """
        teacher 선생님 hon job own / professor 교수님 hon own / guest 손님 hon own / boss 사장님 hon own
        """,
    ),
    (
        "person",
        "명",
        """
        mother 어머니 f hon kin elder / father 아버지 m hon kin elder / grandmother 할머니 f hon kin elder
        grandfather 할아버지 m hon kin elder / parents 부모님 plural hon kin elder / uncle 삼촌 m kin elder
        aunt 이모 f kin elder / son 아들 m kin young / daughter 딸 f kin young / husband 남편 m kin spouse
        wife 아내 f kin spouse / cousin 사촌 kin / nephew 조카 m kin young / grandson 손자 m kin young
        granddaughter 손녀 f kin young
        """,
    ),
    (
        "animal",
        "마리",
        """
        dog 개 pet bites / cat 고양이 pet cute / puppy 강아지 pet cute bites / bird 새 pet cute flies
        horse 말 pet fast / cow 소 pet / pig 돼지 pet / chicken 닭 pet / duck 오리 pet cute
        rabbit 토끼 pet cute fast / sheep 양 pet cute / mouse 쥐 wild bites / lion 사자 wild fierce
        tiger 호랑이 wild fierce bites / bear 곰 wild fierce / elephant 코끼리 wild / monkey 원숭이 wild
        fox 여우 wild bites / wolf 늑대 wild fierce bites / snake 뱀 wild bites / frog 개구리 wild
        turtle 거북이 pet / butterfly 나비 wild flies / eagle 독수리 wild flies
        """,
    ),
    (
        "food goods",
        "개",
        """
        bread 빵 mass made baked cut soft / rice 밥 mass / meat 고기 mass cooked baked cut
        fish 생선 mass cooked baked / soup 수프 mass made hot / kimchi 김치 mass made spicy
        cheese 치즈 mass made cut soft / salad 샐러드 mass made / pizza 피자 mass made baked cut
        chocolate 초콜릿 mass made sweet / egg 달걀 cooked / cake 케이크 made baked cut sweet soft
        cookie 쿠키 made baked sweet / hamburger 햄버거 made / noodles 국수 plural made cooked spicy hot
        """,
    ),
    (
        "food goods fresh washed cut",
        "개",
        """
        potato 감자 cooked baked grown / carrot 당근 cooked grown / onion 양파 cooked grown spicy
        tomato 토마토 grown / cabbage 배추 grown nocount
        """,
    ),
    (
        "food goods fruit fresh washed cut sweet",
        "개",
        """
        apple 사과 round / pear 배 round / peach 복숭아 round soft / strawberry 딸기 / watermelon 수박 round heavy
        orange 오렌지 round / banana 바나나 soft / grapes 포도 plural
        """,
    ),
    (
        "drink goods mass",
        "잔",
        """
        water 물 boils liquid / milk 우유 boils liquid fresh / coffee 커피 hot / tea 차 hot
        juice 주스 liquid fresh sweet / beer 맥주 liquid / wine 와인 liquid
        """,
    ),
    ("meal bare", "", "breakfast 아침 / lunch 점심 / dinner 저녁"),
    (
        "readable goods",
        "권",
        """
        book 책 kept thick bookish / novel 소설 bookish written / dictionary 사전 kept thick / newspaper 신문 부:
        poem 시 편: written bookish audible / letter 편지 통: written kept tears / diary 일기 nocount written
        """,
    ),
    (
        "goods kept",
        "개",
        """
        pencil 연필 자루: long writes / pen 펜 자루: writes / paper 종이 mass tears thin / key 열쇠
        wallet 지갑 pretty / umbrella 우산 folded colored / ring 반지 pretty round / coin 동전 picked
        ticket 표 장: / map 지도 장: drawn tears / photo 사진 장: tears hung / picture 그림 장: drawn hung
        doll 인형 cute pretty made / toy 장난감 made / ball 공 round thrown colored / candle 양초 / gift 선물
        flower 꽃 송이: drawn pretty colored grown / rose 장미 송이: drawn pretty colored grown
        money 돈 mass picked
        """,
    ),
    (
        "goods worn kept colored pretty",
        "벌",
        """
        shirt 셔츠 clothes thin folded / skirt 치마 clothes long / coat 코트 clothes thick hung warm
        dress 원피스 clothes long / sweater 스웨터 clothes warm soft / pants 바지 clothes long plural
        hat 모자 개: hung / scarf 목도리 개: long warm soft / gloves 장갑 plural warm / shoes 신발 plural fits
        glasses 안경 plural
        """,
    ),
    (
        "goods furniture moved sturdy",
        "개",
        """
        chair 의자 heavy fits sat / desk 책상 heavy surface / table 탁자 heavy round surface
        bed 침대 fits sat surface lain / sofa 소파 fits sat soft lain / box 상자 heavy opened
        bag 가방 heavy opened kept colored / basket 바구니 / mirror 거울 hung round breaks
        """,
    ),
    ("opened pushed", "개", "door 문 / window 창문 breaks / floor 바닥 unique -opened -pushed"),
    (
        "goods dish washed",
        "개",
        """
        cup 컵 breaks colored pretty / bowl 그릇 breaks / pot 냄비 heavy / bottle 병 breaks opened
        spoon 숟가락 eats / fork 포크 eats / knife 칼 cuts
        """,
    ),
    (
        "goods machine",
        "대",
        """
        computer 컴퓨터 switched / camera 카메라 kept / radio 라디오 switched audible / television 텔레비전 switched
        phone 전화기 kept rings / piano 피아노 learned heavy / guitar 기타 learned kept
        clock 시계 개: hung round rings
        """,
    ),
    (
        "goods vehicle machine colored",
        "대",
        """
        car 자동차 driven fast / bicycle 자전거 kept / truck 트럭 driven / bus 버스 driven travels
        taxi 택시 driven travels / train 기차 fast travels / airplane 비행기 fast travels flies
        ship 배 척: travels
        """,
    ),
    ("goods tool", "개", "hammer 망치 heavy / ladder 사다리 long / rope 밧줄 long pulled cut / bell 종 unique rings"),
    (
        "nature",
        "개",
        """
        tree 나무 그루: drawn grown / leaf 나뭇잎 장: picked falls drawn colored
        stone 돌 picked thrown round heavy / star 별 drawn shines / moon 달 unique drawn shines round rises
        sun 해 unique shines rises
        """,
    ),
    (
        "place",
        "개",
        """
        park 공원 in wide visited quiet / garden 정원 in own wide pretty / library 도서관 in visited built quiet
        hospital 병원 in visited built / market 시장 at noisy visited / store 가게 in own visited
        restaurant 식당 in noisy visited famed / cafe 카페 in noisy visited quiet famed / bank 은행 in visited built
        church 교회 in visited built / temple 절 at visited built quiet famed / museum 박물관 in visited built famed
        theater 극장 in visited built / station 역 at noisy / airport 공항 at noisy wide
        post office 우체국 at visited / office 사무실 in own indoors / factory 공장 in built
        house 집 in own indoors built wide / kitchen 부엌 in own indoors wide / room 방 in own indoors wide
        classroom 교실 in own indoors noisy wide / playground 운동장 in noisy wide
        street 거리 on crossed noisy wide / village 마을 in own visited left quiet / city 도시 in visited left noisy
        mountain 산 on climbed high drawn / river 강 by crossed deep wide drawn long / lake 호수 by deep wide drawn
        sea 바다 by deep wide drawn / beach 해변 on wide / forest 숲 in quiet / island 섬 on visited left drawn
        farm 농장 on own visited wide / zoo 동물원 at visited wide / hotel 호텔 at visited built left famed
        bookstore 서점 in visited / bridge 다리 on crossed built long / school 학교 at bare visited built
        """,
    ),
    (
        "place city bare visited left",
        "",
        """
        Seoul 서울 in / Busan 부산 in / Korea 한국 in / Japan 일본 in / China 중국 in / America 미국 in
        """,
    ),
    (
        "subject bare",
        "",
        """
        math 수학 / science 과학 / history 역사 / art 미술 / English 영어 / Korean 한국어 / Chinese 중국어
        Japanese 일본어
        """,
    ),
    ("sport bare", "", "soccer 축구 / baseball 야구 / basketball 농구"),
    (
        "pleasure",
        "편",
        """
        music 음악 bare audible / song 노래 곡: audible pretty / news 뉴스 unique audible / movie 영화 shown
        drama 드라마 shown / game 경기 nocount shown event finished / story 이야기 nocount told audible strange
        dream 꿈 nocount strange known
        """,
    ),
    (
        "known",
        "개",
        """
        name 이름 nocount asked forgotten / address 주소 nocount asked forgotten / secret 비밀 forgotten told
        promise 약속 forgotten important / question 질문 hard / answer 답 nocount asked
        problem 문제 hard solved important / quiz 퀴즈 hard solved / riddle 수수께끼 hard solved
        plan 계획 important nocount / reason 이유 nocount asked important / price 가격 nocount asked
        mistake 실수 nocount / truth 진실 unique told
        """,
    ),
    (
        "event",
        "개",
        """
        class 수업 own finished hard interest / meeting 회의 finished important
        exam 시험 finished hard prepared important / festival 축제 / concert 음악회 interest shown
        party 파티 own prepared / trip 여행 own prepared / homework 숙제 mass finished hard
        work 일 mass finished hard
        """,
    ),
    ("weather", "", "weather 날씨 unique / wind 바람 unique"),
)
